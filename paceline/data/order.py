"""Sample order of the batches: a pure function of (seed, epoch, step, length).

::

    epoch e      a permutation of all samples, from (seed, e)
    step t       the next `batch` of them; the last one may be short
    microbatch   a fixed slice of the batch (schedule.shares.microbatches), or a list of the function microbatch_order

The order does not depend on the number of workers. A position in training is a single integer, the step.

Up to ``LARGEST_SHUFFLE`` samples the permutation is a shuffle (``torch.randperm``), which takes 8 bytes a sample, at
most 8 MB. Above that limit it is a Feistel network (``schedule.feistel``): each step computes only its own samples, at
a cost that does not grow with the data set. Unlike a shuffle, a Feistel network on few numbers cannot produce every
permutation; on many numbers the two are indistinguishable.
"""

from __future__ import annotations

import hashlib
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any

import torch

from paceline.comm.world import World
from paceline.data.keys import ORDER, preserve_generators, seed_of
from paceline.errors import ConfigError, InputError
from paceline.schedule import feistel, shares
from paceline.schedule.microbatch_orders import MicrobatchOrder
from paceline.system.usage import does_not_take
from paceline.system.user_code import in_user_call

LARGEST_SHUFFLE = 1 << 20
"""Largest number of samples for which an epoch is a shuffle held in memory."""
UNKNOWN = sys.maxsize
"""Stands for a step that is not known yet, such as the end of a stream."""
_COMPARED = 8
"""Number of batches of the first epoch whose microbatches are compared between workers and with a checkpoint."""
_CURE = (
    "microbatch_order must be a pure function of (samples, count) that gives at most count lists with the samples of "
    "the batch, such as paceline.in_turn, paceline.by_length(lengths), paceline.by_tokens(lengths) or "
    "paceline.by_class(labels)"
)


class Cut:
    """Cut of batches into microbatches by a function of the user.

    Args:
        function: ``function(samples, count)`` returns the samples of each microbatch, at most ``count`` of them.

    Raises:
        InputError: it is not such a function.
    """

    def __init__(self, function: MicrobatchOrder) -> None:
        if not callable(function):
            raise InputError(f"microbatch_order is {function!r}, a {type(function).__name__}: {_CURE}.")
        if why := does_not_take(function, "samples", "count"):
            raise InputError(f"microbatch_order cannot be called: {why}. The {_CURE}.")
        self._function = function
        self._known = lru_cache(maxsize=4)(self.again)  # the microbatches of a step are asked for several times

    def __call__(self, samples: list[int], count: int) -> list[list[int]]:
        """Return the samples of each microbatch of a batch, which has ``count`` microbatches without a function."""
        return self._known(tuple(samples), count)

    def again(self, samples: tuple[int, ...], count: int) -> list[list[int]]:
        """Call the function, even if its result is known.

        Raises:
            InputError: the result has not every sample once, or too many microbatches, or an empty one.
        """
        try:
            given = self._function([*samples], count)
        except Exception as error:
            in_user_call(error, f"This was microbatch_order of {len(samples)} samples and {count} microbatches.")
            raise
        try:
            found = [[*map(int, one)] for one in given]
        except (TypeError, ValueError):
            raise InputError(f"microbatch_order returned {given!r:.100}: {_CURE}.") from None
        if Counter(chain(*found)) != Counter(samples):
            raise InputError(
                f"microbatch_order gave {sum(map(len, found))} samples in {len(found)} microbatches for a batch of "
                f"{len(samples)}, and not the number of each sample of the batch once: {_CURE}."
            )
        if len(found) > count or not all(found):
            raise InputError(
                f"microbatch_order gave microbatches of {', '.join(str(len(one)) for one in found)} samples for a "
                f"batch of {len(samples)}, which has at most {count} microbatches, none of them empty: {_CURE}."
            )
        return found


class BatchOrder(ABC):
    """Samples and epoch of the batch of each step, identical on every worker."""

    batch: int  # number of samples in a full batch
    microbatches: int  # number of microbatches in a full batch
    seed: int
    drop_last: bool  # whether a short last batch of an epoch is left out
    grows = False  # whether an epoch that has not begun may become longer
    located = False  # whether a worker can read some of the samples only
    moves = False  # whether workers may send samples to others
    wait_seconds = 0.0  # time for which workers wait for samples that none of them still has
    goes_on = False  # whether workers then continue without these samples
    incomplete = False  # whether they do now
    known = UNKNOWN  # first step whose microbatches workers do not know yet
    cut: Cut | None = None  # cut of the batches into microbatches, if the user gives one

    def sends(self, step: int) -> bool:
        """Return whether workers send samples to others in a step. The same on all workers."""
        return False

    def cut_by(self, function: MicrobatchOrder) -> None:
        """Cut batches into microbatches by a function.

        Raises:
            InputError: see :class:`Cut`, or the function gives different microbatches when it is called again.
        """
        self.cut = Cut(function)
        with preserve_generators():
            for step in self._compared():
                found = self.microbatches_of(step)
                if self.cut.again(tuple(self.numbers_of(step)), len(self.slices_of(step))) != found:
                    raise InputError(
                        f"microbatch_order gives different microbatches when it is called again, so each worker would "
                        f"cut a batch in its own way: {_CURE}. It must not draw random numbers."
                    )

    def _compared(self) -> list[int]:
        """Return steps of the first epoch whose microbatches stand for all."""
        end = self.first_of(1)
        return [0] if end == UNKNOWN else sorted({(end - 1) * place // (_COMPARED - 1) for place in range(_COMPARED)})

    def _of_cut(self) -> dict[str, int]:
        """Return a hash of microbatches by the function, by its name. Empty if there is no function."""
        if self.cut is None:
            return {}
        parts = repr([self.microbatches_of(step) for step in self._compared()])
        return {"microbatch_order": int.from_bytes(hashlib.blake2b(parts.encode(), digest_size=6).digest(), "big")}

    def facts(self) -> dict[str, int]:
        """Return the values that determine the order, for a checkpoint."""
        names = "batch", "microbatches", "seed", "drop_last"
        return {name: getattr(self, name) for name in names} | self._of_cut()

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
    def numbers_of(self, step: int) -> list[int]:
        """Return the sample numbers of the batch of a step."""

    def microbatches_of(self, step: int) -> list[list[int]]:
        """Return the sample numbers of each microbatch of a step."""
        numbers, slices = self.numbers_of(step), self.slices_of(step)
        if self.cut is not None:
            return self.cut(numbers, len(slices))
        return [numbers[part.start : part.stop] for part in slices]

    def agreed(self) -> dict[str, object]:
        """Return values that must be equal on all workers before the first step, besides the settings."""
        return {f"data in microbatches by {name}": value for name, value in self._of_cut().items()}

    def digest_at(self, step: int) -> int:
        """Return a digest of the first sample of a stream's batch to compare between workers; 0 if it is not known."""
        return 0

    def state(self, step: int) -> dict[str, Any]:
        """Return the data state after ``step`` steps, for a checkpoint or a joining worker."""
        return {}

    def load(self, state: dict[str, Any]) -> None:  # noqa: B027 - most orders have no state
        """Continue from a state that :meth:`state` returned."""

    def holders_of(self, step: int) -> tuple[tuple[int, ...], ...] | None:
        """Return the ranks that can read each microbatch of a step. None if all workers can read all of them."""
        return None

    def able(self, step: int, microbatch: int, workers: int) -> Sequence[int]:
        """Return the ranks that can read a microbatch of a step."""
        holders = self.holders_of(step)
        return range(workers) if holders is None else holders[microbatch]

    def shard_of(self, step: int, microbatches: Collection[int]) -> str:
        """Return the name of the only shard of some microbatches, or "" if each worker has all data."""
        return ""

    def example(self, step: int) -> tuple[int, list[range]]:
        """Return a step, from ``step`` on, and a microbatch of it that this worker can read, for a probe, if any."""
        return step, [range(1)]

    def meet(self, world: World, doing: str, without: bool = False) -> None:  # noqa: B027 - every worker has all data
        """Tell the other workers which samples this one has. All workers of a membership call this together.

        Args:
            without: whether to continue without samples of the run that no worker has. Defaults to False.

        Raises:
            InputError, DisagreementError: together they do not have the samples of the run.
        """

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
                "steps_per_epoch is not known, because the data are a stream of unknown length. Use "
                "session.batches(epochs=...), and batch.last for its last batch; give schedules a number of steps."
            )
        return end - self.first_of(epoch)

    def parts_of(self, step: int) -> tuple[range, ...]:
        """Return the range of positions in the batch, microbatch after microbatch, for each microbatch of a step."""
        if self.cut is None:
            return self.slices_of(step)
        stops = accumulate(map(len, self.microbatches_of(step)), initial=0)
        return tuple(range(start, stop) for start, stop in pairwise(stops))

    def slices_of(self, step: int) -> tuple[range, ...]:
        """Return the range of positions in the batch for each microbatch of a step, if no function cuts the batch."""
        return shares.microbatches(self.samples_of(step), self.batch, self.microbatches)


@dataclass(eq=False)
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
        rounds = {} if self.length <= LARGEST_SHUFFLE else {"feistel_rounds": feistel.ROUNDS}
        return {"length": self.length, **super().facts(), **rounds}

    def agreed(self) -> dict[str, object]:
        return {"data length": self.length, **super().agreed()}

    @cached_property
    def steps_per_epoch(self) -> int:
        """Number of steps in a pass over the data set, including a short last batch unless it is dropped."""
        return self.length // self.batch if self.drop_last else -(-self.length // self.batch)

    def cuts(self) -> set[int]:
        return super().cuts() if self.cut else {self.microbatches, len(self.slices_of(self.steps_per_epoch - 1))}

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

    def numbers_of(self, step: int) -> list[int]:
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.batch
        return _samples(self.length, seed_of(ORDER, self.seed, epoch), start, min(start + self.batch, self.length))


@lru_cache(maxsize=4)  # a step may be loaded in several calls
def _samples(length: int, seed: int, start: int, stop: int) -> list[int]:
    """Return the samples at the positions ``start`` to ``stop`` (exclusive) of an epoch."""
    if length > LARGEST_SHUFFLE:
        return feistel.permute(start, stop, length, seed)
    return _shuffle(length, seed)[start:stop].tolist()


@lru_cache(maxsize=2)
def _shuffle(length: int, seed: int) -> torch.Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))
