"""Sample order of the batches: a pure function of (seed, epoch, step, length).

::

    epoch e      a permutation of all samples, from (seed, e)
    step t       the next `batch` of them; the last one may be short
    microbatch   a fixed slice of the batch (schedule.shares.microbatches)

The order does not depend on the number of workers. A position in training is a single integer, the step.

Up to ``LARGEST_SHUFFLE`` samples the permutation is a shuffle (``torch.randperm``), which takes 8 bytes a sample, at
most 8 MB. Above that limit it is a Feistel network (feistel.py): each step computes only its own samples, at a cost
that does not grow with the data set. Unlike a shuffle, a Feistel network on few numbers cannot produce every
permutation; on many numbers the two are indistinguishable.
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
"""Largest number of samples for which an epoch is a shuffle held in memory."""
UNKNOWN = sys.maxsize
"""Stands for a step that is not known yet, such as the end of a stream."""


class BatchOrder(ABC):
    """Samples and epoch of the batch of each step, identical on every worker."""

    batch: int  # number of samples in a full batch
    microbatches: int  # number of microbatches in a full batch
    seed: int
    drop_last: bool  # whether a short last batch of an epoch is left out

    def facts(self) -> dict[str, int]:
        """Return the values that determine the order, for a checkpoint."""
        return {name: getattr(self, name) for name in ("batch", "microbatches", "seed", "drop_last")}

    @abstractmethod
    def place_of(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step and the index of its batch in this epoch."""

    @abstractmethod
    def first_of(self, epoch: int) -> int:
        """Return the first step of an epoch, or ``UNKNOWN`` if it is not known yet."""

    @abstractmethod
    def samples_of(self, step: int) -> int:
        """Return the number of samples in the batch of a step."""

    @abstractmethod
    def samples_before(self, step: int) -> int:
        """Return the number of samples in all steps before ``step``."""

    @abstractmethod
    def microbatches_of(self, step: int) -> list[list[int]]:
        """Return the sample numbers of each microbatch of a step."""

    def agreed(self) -> dict[str, object]:
        """Return values that must be equal on all workers before the first step, besides the settings."""
        return {}

    def digest_at(self, step: int) -> int:
        """Return a digest of the first sample of a stream's batch to compare between workers; 0 if it is not known."""
        return 0

    def state(self, step: int) -> dict[str, Any]:
        """Return the data state after ``step`` steps, for a checkpoint or a joining worker."""
        return {}

    def load(self, state: dict[str, Any]) -> None:  # noqa: B027 - most orders have no state
        """Continue from a state that :meth:`state` returned."""

    def cuts(self) -> set[int]:
        """Return the possible numbers of microbatches in a batch."""
        return set(range(1, self.microbatches + 1))

    def epoch_of(self, step: int) -> int:
        """Return the epoch of a step."""
        return self.place_of(step)[0]

    def is_last(self, step: int) -> bool:
        """Return whether the batch of a step is the last batch of its epoch."""
        self.samples_of(step)
        return self.first_of(self.epoch_of(step) + 1) == step + 1

    def end_of(self, epochs: int, start: int) -> int:
        """Return the step (exclusive) at which ``epochs`` epochs from ``start`` end, or ``UNKNOWN``."""
        return self.first_of(self.epoch_of(start) + epochs)

    def steps_at(self, step: int) -> int:
        """Return the number of steps in the epoch of a step."""
        epoch = self.epoch_of(step)
        end = self.first_of(epoch + 1)
        if end == UNKNOWN:
            raise ConfigError(
                "steps_per_epoch is not known, as the data are a stream: nobody knows how many samples will come. Use "
                "session.batches(epochs=...), and batch.last for its last batch; give schedules a number of steps."
            )
        return end - self.first_of(epoch)

    def parts_of(self, step: int) -> tuple[range, ...]:
        """Return the range of positions in the batch for each microbatch of a step."""
        return shares.microbatches(self.samples_of(step), self.batch, self.microbatches)


@dataclass(frozen=True)
class Order(BatchOrder):
    """Shuffled order of a data set of fixed length.

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
        """Return the fields, and the number of Feistel rounds if the order is not a shuffle, for a checkpoint."""
        return asdict(self) | ({} if self.length <= LARGEST_SHUFFLE else {"feistel_rounds": feistel.ROUNDS})

    def agreed(self) -> dict[str, object]:
        return {"data length": self.length}

    @cached_property
    def steps_per_epoch(self) -> int:
        """Number of steps in a pass over the data set, including a short last batch unless it is dropped."""
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


@lru_cache(maxsize=4)  # a step may be loaded in several calls
def _microbatches_of(order: Order, step: int) -> list[list[int]]:
    epoch, index = divmod(step, order.steps_per_epoch)
    start = index * order.batch
    stop = min(start + order.batch, order.length)
    samples = _samples(order.length, seed_of(ORDER, order.seed, epoch), start, stop)
    return [samples[part.start : part.stop] for part in order.parts_of(step)]


def _samples(length: int, seed: int, start: int, stop: int) -> list[int]:
    """Return the samples at the positions ``start`` to ``stop`` (exclusive) of an epoch."""
    if length > LARGEST_SHUFFLE:
        return feistel.permute(start, stop, length, seed)
    return _shuffle(length, seed)[start:stop].tolist()


@lru_cache(maxsize=2)
def _shuffle(length: int, seed: int) -> torch.Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))
