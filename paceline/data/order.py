"""The samples of each batch: a pure function of (seed, epoch, step, length).

::

    epoch e      a permutation of all samples, from (seed, e)
    step t       the next `batch` of them; the last one may be short
    microbatch   a fixed slice of the batch (schedule.shares.microbatches)

The number of workers plays no part. A position in training is one whole number: the step.

Up to ``LARGEST_SHUFFLE`` samples the permutation is a shuffle (``torch.randperm``), held in 8 bytes a sample, at most
8 MB. Above it is a Feistel network (feistel.py), of which a step computes its own samples: what a step takes does not
grow with the data set. A shuffle can be every permutation; on few numbers a Feistel network cannot, and on many nobody
can tell them apart.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache

import torch

from paceline.data import feistel
from paceline.data.keys import ORDER, seed_of
from paceline.schedule import shares

LARGEST_SHUFFLE = 1 << 20
"""Samples up to which an epoch is a shuffle that is held in memory."""


@dataclass(frozen=True)
class Order:
    """The order of the samples of one data set in one training run.

    >>> order = Order(length=10, batch=4, microbatches=2, seed=0)
    >>> order.steps_per_epoch
    3
    >>> sorted(sample for step in range(3) for part in order.microbatches_of(step) for sample in part)
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    length: int
    batch: int
    microbatches: int
    seed: int
    drop_last: bool = False

    def facts(self) -> dict[str, int]:
        """What determines the order, for a checkpoint: the fields, and which permutation it is if not a shuffle."""
        return asdict(self) | ({} if self.length <= LARGEST_SHUFFLE else {"feistel_rounds": feistel.ROUNDS})

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps in one pass over the data set, the short last batch included unless it is dropped."""
        return self.length // self.batch if self.drop_last else -(-self.length // self.batch)

    def epoch_of(self, step: int) -> int:
        """The epoch of a step."""
        return step // self.steps_per_epoch

    def samples_of(self, step: int) -> int:
        """The number of samples in the batch of a step."""
        start = step % self.steps_per_epoch * self.batch
        return min(self.batch, self.length - start)

    def samples_before(self, step: int) -> int:
        """The number of samples in all steps before this one."""
        epochs, rest = divmod(step, self.steps_per_epoch)
        per_epoch = self.steps_per_epoch * self.batch if self.drop_last else self.length
        return epochs * per_epoch + rest * self.batch

    def microbatches_of(self, step: int) -> list[list[int]]:
        """The sample numbers of each microbatch of a step."""
        return _microbatches_of(self, step)

    def parts_of(self, step: int) -> tuple[range, ...]:
        """The positions of each microbatch of a step in the batch."""
        return shares.microbatches(self.samples_of(step), self.batch, self.microbatches)


@lru_cache(maxsize=4)  # a step asks once per microbatch
def _microbatches_of(order: Order, step: int) -> list[list[int]]:
    epoch, index = divmod(step, order.steps_per_epoch)
    start = index * order.batch
    stop = min(start + order.batch, order.length)
    samples = _samples(order.length, seed_of(ORDER, order.seed, epoch), start, stop)
    return [samples[part.start : part.stop] for part in order.parts_of(step)]


def _samples(length: int, seed: int, start: int, stop: int) -> list[int]:
    """The samples at these places of an epoch."""
    if length > LARGEST_SHUFFLE:
        return feistel.permute(start, stop, length, seed)
    return _shuffle(length, seed)[start:stop].tolist()


@lru_cache(maxsize=2)
def _shuffle(length: int, seed: int) -> torch.Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))
