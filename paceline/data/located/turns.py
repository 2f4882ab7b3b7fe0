"""Order of shards that are streams, whose lengths are known once they have ended: they take turns.

::

    stream a    a0 a1 a2 a3 a4         epoch 0    a0 b0 c0 │ a1 b1 c1 │ a2 b2 │ a3 │ a4        5 rounds
    stream b    b0 b1 b2               step 0     a0 b0 c0   a1                                batches of 4 microbatches
    stream c    c0 c1                  step 1     b1 c1 a2   b2
                                       step 2     a3 a4                                        the last one of the epoch

In each round every stream that has not ended gives its next microbatch, in an order that is drawn for the epoch. An
epoch ends when all streams have ended. What follows is a function of the seed and of the lengths of the streams
so far, which workers tell each other (``located.readers``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from paceline.comm.values import sendable
from paceline.data.keys import ORDER, seed_of
from paceline.data.located.shuffled import Part
from paceline.data.order import UNKNOWN


@sendable
class Reading(NamedTuple):
    """Knowledge of a stream: the number of samples in each epoch that has ended, and so far in the next one.

    Equal on all workers that have the stream, except for the marks.
    """

    ends: list[int]
    seen: int = 0  # samples of the next epoch, which has more
    is_empty: bool = False  # the next epoch has no samples
    digest: str = ""  # of the first sample of the microbatch that was read last
    draws: bool = False  # whether the stream draws from a global generator
    marks: Sequence[tuple[int, int, object, str]] = ()  # epoch, microbatch, and ``streams.reader.Mark``, to begin with


class Turns:
    """Microbatches of each step, as far as they are known.

    Args:
        size: largest number of samples in a microbatch.
        microbatches: number of microbatches in a batch.

    Attributes:
        known: first step that is not known.
        epoch: first epoch in which not all streams have ended.
    """

    def __init__(self, size: int, microbatches: int, seed: int) -> None:
        self._size, self._microbatches, self._seed = size, microbatches, seed
        self._readings: list[Reading] = []
        self._starts = [0]  # first step of each epoch, up to the current one
        self.known = self.epoch = 0

    def hear(self, readings: Mapping[str, Reading]) -> None:
        """Take over the current readings of all streams."""
        self._readings = [readings[name] for name in sorted(readings)]
        while all(len(one.ends) > self.epoch for one in self._readings):
            self._starts.append(self._starts[-1] - -sum(self._counts(self.epoch)) // self._microbatches)
            self.epoch += 1
        self.known = self._starts[-1] + self._turns(self.epoch, self._rounds) // self._microbatches

    @property
    def is_over(self) -> bool:
        """Whether a stream has no samples in the current epoch."""
        return any(one.is_empty for one in self._readings)

    @property
    def _rounds(self) -> int:
        """Number of rounds of the current epoch that are known."""
        return min(one.seen // self._size for one in self._readings if len(one.ends) == self.epoch)

    def rounds_for(self, steps: int) -> int:
        """Return the number of rounds of the current epoch with which ``steps`` steps are known, if no stream ends."""
        live = sum(len(one.ends) == self.epoch for one in self._readings)
        missing = (steps - self._starts[-1]) * self._microbatches - self._turns(self.epoch, self._rounds)
        return self._rounds + max(1, -(-missing // live))

    def place_of(self, step: int) -> tuple[int, int]:
        epoch = bisect_right(self._starts, step) - 1
        return epoch, step - self._starts[epoch]

    def first_of(self, epoch: int) -> int:
        return self._starts[epoch] if epoch < len(self._starts) else UNKNOWN

    def samples_before(self, step: int) -> int:
        epoch = self.place_of(step)[0]
        taken = zip(self._readings, self._taken_before(step), strict=True)
        return sum(
            sum(one.ends[:epoch]) + min([count * self._size, *one.ends[epoch : epoch + 1]]) for one, count in taken
        )

    def parts_of(self, step: int) -> list[Part]:
        """Return the microbatches of a step."""
        epoch, index = self.place_of(step)
        stop = min((index + 1) * self._microbatches, sum(self._counts(epoch)))
        both = zip(self._taken_before(step), self._taken(epoch, stop), strict=True)
        return [Part(shard, place) for shard, (first, end) in enumerate(both) for place in range(first, end)]

    def size_of(self, epoch: int, part: Part) -> int:
        """Return the number of samples of a microbatch of an epoch."""
        ends = self._readings[part.shard].ends
        return min([self._size, *(end - part.place * self._size for end in ends[epoch : epoch + 1])])

    def numbers_of(self, epoch: int, part: Part) -> list[int]:
        """Return the sample numbers of a microbatch, see :meth:`part_of`."""
        first, shards = part.place * self._size, len(self._readings)
        return [sample * shards + part.shard for sample in range(first, first + self.size_of(epoch, part))]

    def part_of(self, number: int) -> Part:
        """Return the microbatch of a sample. Sample n of stream s of N has the number nN + s."""
        sample, shard = divmod(number, len(self._readings))
        return Part(shard, sample // self._size)

    def next_of(self, step: int) -> list[tuple[int, int]]:
        """Return the epoch and the place of the microbatch that each stream gives first from a step on."""
        epoch, _ = self.place_of(step)
        taken = zip(self._taken_before(step), self._counts(epoch), strict=True)
        return [(epoch, count) if count < most else (epoch + 1, 0) for count, most in taken]

    def _taken_before(self, step: int) -> list[int]:
        """Return the number of microbatches that each stream has given in the epoch of a step before the step."""
        epoch, index = self.place_of(step)
        return self._taken(epoch, index * self._microbatches)

    def _taken(self, epoch: int, turns: int) -> list[int]:
        rounds = bisect_right(range(turns + 1), turns, key=lambda rounds: self._turns(epoch, rounds)) - 1
        counts, left = self._counts(epoch), turns - self._turns(epoch, rounds)
        later = [shard for shard in self._sequence(epoch) if counts[shard] > rounds][:left]
        return [min(count, rounds) + (shard in later) for shard, count in enumerate(counts)]

    def _turns(self, epoch: int, rounds: int) -> int:
        """Return the number of turns in the first rounds of an epoch."""
        return sum(min(count, rounds) for count in self._counts(epoch))

    def _counts(self, epoch: int) -> list[int]:
        """Return the number of microbatches of each stream in an epoch; ``UNKNOWN`` if it has not ended."""
        size = self._size
        return [-(-one.ends[epoch] // size) if epoch < len(one.ends) else UNKNOWN for one in self._readings]

    def _sequence(self, epoch: int) -> list[int]:
        """Return the order in which the streams take turns."""
        generator = torch.Generator().manual_seed(seed_of(ORDER, self._seed, epoch))
        shuffled: list[int] = torch.randperm(len(self._readings), generator=generator).tolist()
        return shuffled
