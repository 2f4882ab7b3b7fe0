"""Sample order of a user-defined sampler: a pure function of (seed, epoch) that returns the sample numbers of an epoch.

Epochs may differ in length, omit samples, and repeat samples. Every worker calls the function with the global
generators seeded by (seed, epoch), so random draws from them are the same on all workers.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sized
from typing import Any, TypeAlias

import torch
from torch.utils.data import DistributedSampler, Sampler

from paceline.data.keys import ORDER, preserve_generators, seed_all, seed_of
from paceline.data.order import BatchOrder
from paceline.errors import InputError
from paceline.system.usage import does_not_take

SampleNumbers: TypeAlias = Callable[[int, int], Iterable[int]]
_CURE = (
    "sampler must be a pure function of (seed, epoch) that gives sample numbers, such as lambda seed, epoch: "
    "torch.randperm(len(data), generator=torch.Generator().manual_seed(seed + epoch))"
)


class SampledOrder(BatchOrder):
    """Sample order of a sampler.

    Args:
        sampler: ``sampler(seed, epoch)`` returns the sample numbers of an epoch in order. It may be a torch sampler.

    Raises:
        InputError: the sampler is not such a function, or returns other numbers when it is called again.
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
                f"The sampler gives other numbers when it is called again for epoch 0, so each worker would have an "
                f"order of its own: {_CURE}. It may draw from the global generators, which are seeded before."
            )

    def facts(self) -> dict[str, int]:
        return {"sampler": int(self._first[:12], 16), "length": self._length, **super().facts()}

    def agreed(self) -> dict[str, object]:
        return {"data length": self._length, "data order by the sampler": self._first}

    def place_of(self, step: int) -> tuple[int, int]:
        while step >= self._starts[-1]:
            self._add(len(self._numbers(len(self._lengths))))
        epoch = bisect_right(self._starts, step) - 1
        return epoch, step - self._starts[epoch]

    def _add(self, length: int) -> None:
        """Append the next epoch, for which the sampler returned ``length`` numbers."""
        used = self._used(length)
        self._lengths.append(used)
        self._starts.append(self._starts[-1] + -(-used // self.batch))

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
        return min(self.batch, self._lengths[epoch] - index * self.batch)

    def samples_before(self, step: int) -> int:
        if step == self._starts[-1]:  # the next epoch is not drawn yet
            return sum(self._lengths)
        epoch, index = self.place_of(step)
        return sum(self._lengths[:epoch]) + index * self.batch

    def microbatches_of(self, step: int) -> list[list[int]]:
        epoch, index = self.place_of(step)
        start = index * self.batch
        numbers = self._numbers(epoch)[start : start + self.samples_of(step)].tolist()
        return [numbers[part.start : part.stop] for part in self.parts_of(step)]

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
            given = self._sampler(self.seed, epoch)
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
                f"The sampler gave {numbers.numel()} samples for epoch {epoch}, which is no batch: {_CURE}."
            )
        if numbers.ndim != 1 or not whole:
            raise InputError(
                f"The sampler gave a {numbers.ndim}-dimensional sequence of {numbers.dtype} for epoch {epoch}: "
                f"{_CURE}. It gives no batches; batch says how many of the numbers make one."
            )
        wrong = numbers[(numbers < 0) | (numbers >= self._length)]
        if len(wrong):
            raise InputError(
                f"The sampler gave number {int(wrong[0])} for epoch {epoch}, but the data set has the samples 0 to "
                f"{self._length - 1}."
            )
        return numbers.to("cpu", torch.int64)


def in_order(data: Sized, seed: int, epoch: int) -> range:
    """Return the sample numbers of a data set in order, as a sampler that does not shuffle."""
    return range(len(data))


def function_of(sampler: Any) -> SampleNumbers:
    """Return a sampler as a function of (seed, epoch). The caller seeds the generators from which it draws."""
    if isinstance(sampler, DistributedSampler):
        raise InputError(
            f"sampler is a {type(sampler).__name__}, but Paceline hands out the shares itself. Leave it out: the order "
            f"is shuffled anew in each epoch, the same for any number of workers."
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
