"""Sample order of a user-defined sampler: a pure function of (seed, epoch) that returns the sample numbers of an epoch.

A batch sampler returns lists of numbers, which are the batches. Epochs may differ in length, omit samples, and repeat
samples. Every worker calls the function with the global generators seeded by (seed, epoch), so random draws from them
are the same on all workers.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence, Sized
from itertools import islice, pairwise
from typing import Any, TypeAlias

import torch
from torch.utils.data import DistributedSampler, Sampler

from paceline.data.keys import ORDER, preserve_generators, seed_all, seed_of
from paceline.data.order import BatchOrder
from paceline.errors import ConfigError, InputError
from paceline.schedule.shares import even
from paceline.system.usage import does_not_take

SampleNumbers: TypeAlias = Callable[[int, int], "Iterable[int] | Iterable[Sequence[int]]"]
_CURE = (
    "sampler must be a pure function of (seed, epoch) that gives sample numbers, such as lambda seed, epoch: "
    "torch.randperm(len(data), generator=torch.Generator().manual_seed(seed + epoch))"
)


class SampledOrder(BatchOrder):
    """Sample order of a sampler.

    Args:
        sampler: ``sampler(seed, epoch)`` returns the sample numbers of an epoch in order. It may be a torch sampler.

    Raises:
        InputError: the sampler is not such a function, or returns different numbers when it is called again.
    """

    def __init__(
        self, sampler: SampleNumbers, length: int, batch: int, microbatches: int, seed: int, drop_last: bool
    ) -> None:
        self.batch, self.microbatches, self.seed, self.drop_last = batch, microbatches, seed, drop_last
        self._sampler = function_of(sampler)
        self._length = length
        self._lengths: list[int] = []  # number of samples in each epoch whose length is known
        self._starts = [0]
        self._known: dict[int, torch.Tensor] = {}
        # function that returns whether the loop has changed a value that the sampler may read, such as its weights. The
        # state then includes the numbers of the current epoch if the sampler does not return them again.
        self.may_change: Callable[[], bool] = lambda: False
        self._first = _hash(self._numbers(0))
        if _hash(self._drawn(0)) != self._first:
            raise InputError(
                f"The sampler gives different numbers when it is called again for epoch 0, so each worker would have "
                f"an order of its own: {_CURE}. It may draw from the global generators, which are seeded before."
            )

    def facts(self) -> dict[str, int]:
        return {"sampler": int(self._first[:12], 16), "length": self._length, **super().facts()}

    def agreed(self) -> dict[str, object]:
        return {"data length": self._length, "data order by the sampler": self._first, **super().agreed()}

    def place_of(self, step: int) -> tuple[int, int]:
        while step >= self._starts[-1]:
            self._add(len(self._numbers(len(self._lengths))))
        epoch = bisect_right(self._starts, step) - 1
        return epoch, step - self._starts[epoch]

    def _add(self, length: int) -> None:
        """Append the next epoch, for which the sampler returned ``length`` numbers."""
        used = self._used(length)
        self._lengths.append(used)
        self._starts.append(self._starts[-1] + self._steps_in(len(self._lengths) - 1))

    def _steps_in(self, epoch: int) -> int:
        return -(-self._lengths[epoch] // self.batch)

    def _used(self, length: int) -> int:
        """Return the number of samples of an epoch that are in batches."""
        return length - length % self.batch if self.drop_last else length

    def first_of(self, epoch: int) -> int:
        while epoch >= len(self._starts):
            number = len(self._lengths)  # only its length counts: the loop may change weights until the epoch begins
            self._add(len(self._known[number] if number in self._known else self._checked(number, self._drawn(number))))
        return self._starts[epoch]

    def samples_of(self, step: int) -> int:
        epoch, index = self.place_of(step)
        start, stop = self._bounds(epoch, index)
        return stop - start

    def _bounds(self, epoch: int, index: int) -> tuple[int, int]:
        """Return where a batch begins and ends in the numbers of its epoch."""
        return index * self.batch, min((index + 1) * self.batch, self._lengths[epoch])

    def samples_before(self, step: int) -> int:
        if step == self._starts[-1]:  # the next epoch is not drawn yet
            return sum(self._lengths)
        epoch, index = self.place_of(step)
        return sum(self._lengths[:epoch]) + self._bounds(epoch, index)[0]

    def numbers_of(self, step: int) -> list[int]:
        epoch, index = self.place_of(step)
        start, stop = self._bounds(epoch, index)
        numbers: list[int] = self._numbers(epoch)[start:stop].tolist()
        return numbers

    def state(self, step: int) -> dict[str, Any]:
        epoch = bisect_right(self._starts, step) - 1  # place_of would draw an epoch that has not begun
        state: dict[str, Any] = {"lengths": self._lengths[:epoch]}
        known = self._known.get(epoch)
        if known is not None and step > self._starts[epoch] and self.may_change():
            again = self._checked(epoch, self._drawn(epoch))
            state |= {} if torch.equal(again, known) else {"numbers": known}
        return state

    def load(self, state: dict[str, Any]) -> None:
        for length in state["lengths"][len(self._lengths) :]:
            self._add(length)
        self._known.clear()
        if "numbers" in state:
            self._known[len(state["lengths"])] = state["numbers"].to("cpu", torch.int64)

    def _numbers(self, epoch: int) -> torch.Tensor:
        if epoch not in self._known:
            self._known[epoch] = numbers = self._checked(epoch, self._drawn(epoch))
            if epoch < len(self._lengths) and self._used(len(numbers)) != self._lengths[epoch]:
                raise InputError(
                    f"The sampler gave {self._lengths[epoch]} samples for epoch {epoch} when its length was asked for, "
                    f"and gives {len(numbers)} now. The loop may change which samples it gives, but how many must "
                    f"follow from the epoch alone."
                )
            for other in list(self._known)[:-2]:  # keep the two epochs drawn last
                del self._known[other]
        return self._known[epoch]

    def _drawn(self, epoch: int) -> torch.Tensor:
        with preserve_generators():
            seed_all(seed_of(ORDER, self.seed, epoch))
            given: Any = self._sampler(self.seed, epoch)
            if isinstance(given, range):
                return torch.arange(given.start, given.stop, given.step)
            try:
                return torch.as_tensor(given if hasattr(given, "__array__") else list(given))
            except (TypeError, ValueError, RuntimeError):
                raise InputError(f"The sampler gave {type(given).__name__} for epoch {epoch}: {_CURE}.") from None

    def _checked(self, epoch: int, numbers: torch.Tensor) -> torch.Tensor:
        whole = not (numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool)
        if not numbers.numel() or (self.drop_last and len(numbers) < self.batch):
            raise InputError(
                f"The sampler gave {numbers.numel()} samples for epoch {epoch}, which is not a batch: {_CURE}."
            )
        if numbers.ndim != 1 or not whole:
            raise InputError(
                f"The sampler gave a {numbers.ndim}-dimensional sequence of {numbers.dtype} for epoch {epoch}: {_CURE}."
            )
        wrong = numbers[(numbers < 0) | (numbers >= self._length)]
        if len(wrong):
            raise InputError(
                f"The sampler gave number {int(wrong[0])} for epoch {epoch}, but the data set has the samples 0 to "
                f"{self._length - 1}."
            )
        return numbers.to("cpu", torch.int64)


class BatchedOrder(SampledOrder):
    """Sample order of a batch sampler, which returns the batches of an epoch as lists of sample numbers.

    Batches may differ in size, up to ``batch``. Each is cut into ``microbatches`` microbatches, in the order of its
    numbers, or into single samples if it has fewer. The sizes of an epoch must follow from its number alone.
    """

    def __init__(self, sampler: SampleNumbers, length: int, batch: int, microbatches: int, seed: int) -> None:
        self._sizes: dict[int, list[int]] = {}
        self._steps: list[int] = []  # number of steps in each epoch before those that were drawn
        super().__init__(sampler, length, batch, microbatches, seed, drop_last=False)
        self._first = _hash(torch.cat((self._numbers(0), torch.tensor(self._sizes_of(0)))))

    def slices_of(self, step: int) -> tuple[range, ...]:
        samples = self.samples_of(step)
        return even(samples, min(samples, self.microbatches))

    def state(self, step: int) -> dict[str, Any]:
        state = super().state(step)
        starts = self._starts[: len(state["lengths"]) + 1]
        return state | {"steps": [after - before for before, after in pairwise(starts)]}

    def load(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
        super().load(state)

    def _steps_in(self, epoch: int) -> int:
        return self._steps[epoch] if epoch < len(self._steps) else len(self._sizes_of(epoch))

    def _bounds(self, epoch: int, index: int) -> tuple[int, int]:
        sizes = self._sizes_of(epoch)
        start = sum(sizes[:index])
        return start, start + sizes[index]

    def _sizes_of(self, epoch: int) -> list[int]:
        if epoch not in self._sizes:
            self._drawn(epoch)
        return self._sizes[epoch]

    def _drawn(self, epoch: int) -> torch.Tensor:
        with preserve_generators():
            seed_all(seed_of(ORDER, self.seed, epoch))
            batches = [_numbers_in(one, epoch) for one in self._sampler(self.seed, epoch)]
        sizes = [len(one) for one in batches]
        if not sizes or not 0 < min(sizes) <= max(sizes) <= self.batch:
            wrong = next((f"a batch of {one} samples" for one in sizes if not 0 < one <= self.batch), "no batch")
            raise InputError(
                f"The batch sampler gave {wrong} for epoch {epoch}, and batch = {self.batch} is the most that a batch "
                f"may have: set batch to the largest, and give no empty batches."
            )
        if self._sizes.setdefault(epoch, sizes) != sizes:
            raise InputError(
                f"The batch sampler gave batches of other sizes when it was called again for epoch {epoch}: it must be "
                f"a pure function of (seed, epoch). It may draw from the global generators, which are seeded before."
            )
        for other in list(self._sizes)[:-3]:
            del self._sizes[other]
        return torch.cat(batches)


def _numbers_in(batch: Any, epoch: int) -> torch.Tensor:
    try:
        numbers = torch.as_tensor(batch if hasattr(batch, "__array__") else list(batch))
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.empty(0, 0)
    if numbers.ndim != 1:
        raise InputError(
            f"The batch sampler gave {type(batch).__name__} among the batches of epoch {epoch}: give lists of sample "
            f"numbers alone."
        )
    return numbers


def order_by(
    sampler: SampleNumbers, length: int, batch: int, microbatches: int, seed: int, drop_last: bool
) -> SampledOrder:
    """Return the order of a sampler, which may be a batch sampler.

    Raises:
        ConfigError: ``drop_last`` is set for a batch sampler.
        InputError: see :class:`SampledOrder`.
    """
    with preserve_generators():
        seed_all(seed_of(ORDER, seed, 0))
        given: Any = function_of(sampler)(seed, 0)
        entries = [] if isinstance(given, range) or not isinstance(given, Iterable) else islice(given, 1)
        batched = any(isinstance(one, list | tuple) or getattr(one, "ndim", 0) == 1 for one in entries)
    if not batched:
        return SampledOrder(sampler, length, batch, microbatches, seed, drop_last)
    if drop_last:
        raise ConfigError("drop_last=True has no meaning for a batch sampler: leave the batch out in the sampler.")
    return BatchedOrder(sampler, length, batch, microbatches, seed)


def in_order(data: Sized, seed: int, epoch: int) -> range:
    """Return the sample numbers of a data set in order, as a sampler that does not shuffle."""
    return range(len(data))


def function_of(sampler: Any) -> SampleNumbers:
    """Return a sampler as a function of (seed, epoch). The caller seeds the generators from which it draws."""
    if isinstance(sampler, DistributedSampler):
        raise InputError(
            f"sampler is a {type(sampler).__name__}, but Paceline hands out the shares itself. Leave it out: the order "
            f"is shuffled again in each epoch, the same for any number of workers."
        )
    if isinstance(sampler, Sampler):
        return lambda seed, epoch: _of_torch(sampler, epoch)
    if not callable(sampler):
        raise InputError(f"sampler is a {type(sampler).__name__}: {_CURE}.")
    if why := does_not_take(sampler, "seed", "epoch"):
        raise InputError(f"The sampler cannot be called: {why}. The {_CURE}.")
    called: SampleNumbers = sampler
    return called


def _of_torch(sampler: Sampler[Any], epoch: int) -> list[Any]:
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    return list(sampler)


def _hash(numbers: torch.Tensor) -> str:
    return hashlib.blake2b(numbers.to("cpu", torch.int64).numpy().tobytes(), digest_size=12).hexdigest()
