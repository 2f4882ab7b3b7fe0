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

import sys
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from paceline.data import feistel
from paceline.data.keys import ORDER, seed_of
from paceline.errors import ConfigError
from paceline.schedule import shares

LARGEST_SHUFFLE = 1 << 20
"""Samples up to which an epoch is a shuffle that is held in memory."""
UNKNOWN = sys.maxsize
"""A step that is not known yet: that at which a stream ends."""


class BatchOrder(ABC):
    """Which samples are in the batch of each step, and which epoch it belongs to; the same on every worker.

    Attributes:
        batch: samples in a full batch.
        microbatches: parts in which a full batch is cut.
        seed: of the run.
    """

    batch: int
    microbatches: int
    seed: int

    @abstractmethod
    def facts(self) -> dict[str, int]:
        """What determines the order, for a checkpoint."""

    @abstractmethod
    def place_of(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and the number of its batch in this epoch."""

    @abstractmethod
    def first_of(self, epoch: int) -> int:
        """The first step of an epoch; ``UNKNOWN`` if that is not known yet."""

    @abstractmethod
    def samples_of(self, step: int) -> int:
        """The number of samples in the batch of a step."""

    @abstractmethod
    def samples_before(self, step: int) -> int:
        """The number of samples in all steps before this one."""

    @abstractmethod
    def microbatches_of(self, step: int) -> list[list[int]]:
        """The sample numbers of each microbatch of a step."""

    def agreed(self) -> dict[str, object]:
        """What must be the same on all workers before the first step, besides the settings."""
        return {}

    def digest_at(self, step: int) -> int:
        """Of a stream a digest of the first sample of a batch that has been read, which must be the same everywhere."""
        return 0

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint after so many steps, or a worker that joins then, must know of the data."""
        return {}

    def load(self, state: dict[str, Any]) -> None:  # noqa: B027 - most know it all
        """Go on from what :meth:`state` returned."""

    def cuts(self) -> set[int]:
        """In how many microbatches a batch may be cut."""
        return set(range(1, self.microbatches + 1))

    def epoch_of(self, step: int) -> int:
        """The epoch of a step."""
        return self.place_of(step)[0]

    def is_last(self, step: int) -> bool:
        """Whether the batch of a step is the last one of its epoch."""
        self.samples_of(step)
        return self.first_of(self.epoch_of(step) + 1) == step + 1

    def end_of(self, epochs: int, start: int) -> int:
        """The step before which so many epochs end, counted from a step on; ``UNKNOWN`` if that is not known yet."""
        return self.first_of(self.epoch_of(start) + epochs)

    def steps_at(self, step: int) -> int:
        """The steps in the epoch of a step.

        Raises:
            ConfigError: they are not known, as the data are a stream.
        """
        epoch = self.epoch_of(step)
        end = self.first_of(epoch + 1)
        if end == UNKNOWN:
            raise ConfigError(
                "steps_per_epoch is not known, as the data are a stream: nobody knows how many samples will come. Use "
                "session.batches(epochs=...), and batch.last for its last batch; give schedules a number of steps."
            )
        return end - self.first_of(epoch)

    def parts_of(self, step: int) -> tuple[range, ...]:
        """The positions of each microbatch of a step in the batch."""
        return shares.microbatches(self.samples_of(step), self.batch, self.microbatches)


@dataclass(frozen=True)
class Order(BatchOrder):
    """A shuffled data set of fixed length.

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

    def agreed(self) -> dict[str, object]:
        return {"data length": self.length}

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps in one pass over the data set, the short last batch included unless it is dropped."""
        return self.length // self.batch if self.drop_last else -(-self.length // self.batch)

    def cuts(self) -> set[int]:
        return {self.microbatches, len(self.parts_of(self.steps_per_epoch - 1))}

    def place_of(self, step: int) -> tuple[int, int]:
        return divmod(step, self.steps_per_epoch)

    def first_of(self, epoch: int) -> int:
        return epoch * self.steps_per_epoch

    def end_of(self, epochs: int, start: int) -> int:
        return start + epochs * self.steps_per_epoch

    def samples_of(self, step: int) -> int:
        start = step % self.steps_per_epoch * self.batch
        return min(self.batch, self.length - start)

    def samples_before(self, step: int) -> int:
        epochs, rest = divmod(step, self.steps_per_epoch)
        per_epoch = self.steps_per_epoch * self.batch if self.drop_last else self.length
        return epochs * per_epoch + rest * self.batch

    def microbatches_of(self, step: int) -> list[list[int]]:
        return _microbatches_of(self, step)


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
