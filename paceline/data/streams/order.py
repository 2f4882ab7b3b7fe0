"""Sample order of a stream. The length of an epoch is known once the epoch has been read.

::

    step     0   1   2   3   4   5   6            epoch 0 has 10 samples, epoch 1 is being read
    batch    0.0 0.1 0.2 1.0 1.1 1.2 1.3 ..       batches of 4: the third of epoch 0 has 2
    starts   0           3

A query about a step reads the stream up to the batch of that step. The result does not depend on the worker or time.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from typing import Any

from paceline.data.order import UNKNOWN, BatchOrder
from paceline.data.streams.reader import Mark, Stream, digest
from paceline.errors import InputError


class StreamOrder(BatchOrder):
    """Sample order of a stream: the number of a sample is its index in its epoch."""

    def __init__(self, data: Any, batch: int, microbatches: int, seed: int, drop_last: bool) -> None:
        self.batch, self.microbatches, self.seed, self.drop_last = batch, microbatches, seed, drop_last
        self._stream = Stream(data, seed, batch, drop_last)
        self._starts = [0]  # first step of each epoch, up to the current epoch
        self._lengths: list[int] = []  # number of samples in each earlier epoch
        self._begun = 0  # number of batches of the current epoch that are known not to be its last

    def facts(self) -> dict[str, int]:
        return {"stream": 1, **super().facts()}

    def agreed(self) -> dict[str, object]:
        return {"data first sample": digest(self._stream.batch(0, 0).items[0]), **super().agreed()}

    def check_repeats(self) -> None:
        """Read the first sample again; see :meth:`Stream.check_repeats`."""
        self._stream.check_repeats()

    def place_of(self, step: int) -> tuple[int, int]:
        while step >= self._starts[-1]:
            index = step - self._starts[-1]
            if index <= self._begun:
                return len(self._starts) - 1, index
            self._read(self._begun)
        epoch = bisect_right(self._starts, step) - 1
        return epoch, step - self._starts[epoch]

    def _read(self, index: int) -> None:
        """Read the first batch of the current epoch that may be its last batch."""
        epoch = len(self._starts) - 1
        items, last = self._stream.batch(epoch, index)
        self._begun = index + 1
        if last:
            self._lengths.append(index * self.batch + len(items))
            self._starts.append(self._starts[-1] + index + 1)
            self._begun = 0

    def first_of(self, epoch: int) -> int:
        return self._starts[epoch] if epoch < len(self._starts) else UNKNOWN

    def samples_of(self, step: int) -> int:
        epoch, index = self.place_of(step)
        if epoch == len(self._lengths) and index == self._begun:
            self._read(index)
        if epoch < len(self._lengths):
            return min(self.batch, self._lengths[epoch] - index * self.batch)
        return self.batch

    def samples_before(self, step: int) -> int:
        epoch, index = self.place_of(step)
        return sum(self._lengths[:epoch]) + index * self.batch

    def numbers_of(self, step: int) -> list[int]:
        start = self.place_of(step)[1] * self.batch
        return [*range(start, start + self.samples_of(step))]

    def read(self, epoch: int, samples: list[int]) -> list[Any]:
        """Return samples of one batch by number. Lists and dictionaries are shallow copies that may be changed."""
        index = samples[0] // self.batch
        batch = self._stream.batch(epoch, index)
        chosen = [batch.items[sample - index * self.batch] for sample in samples]
        return [copy.copy(item) if isinstance(item, dict | list) else item for item in chosen]

    def digest_at(self, step: int) -> int:
        mark = self._stream.mark(*self.place_of(step))
        return 0 if mark is None else int(mark.digest[:12] or "0", 16)

    def state(self, step: int) -> dict[str, Any]:
        epoch, index = self.place_of(step)
        marks = {place: self._stream.mark(epoch, place) for place in (0, index)}
        known = {place: tuple(mark) for place, mark in marks.items() if mark is not None}
        return {"lengths": self._lengths[:epoch], "index": index, "marks": known, "draws": self._stream.draws}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state that :meth:`state` returned."""
        lengths, index = list(state["lengths"]), int(state["index"])
        for epoch, (here, there) in enumerate(zip(self._lengths, lengths, strict=False)):
            if here != there:
                raise InputError(
                    f"Epoch {epoch} of the stream had {there} samples where the state comes from, and {here} here. "
                    f"Every worker and every resumed run must read the same samples in the same order."
                )
        if len(lengths) >= len(self._lengths):
            self._begun = index if len(lengths) > len(self._lengths) else max(index, self._begun)
            self._lengths = lengths
            self._starts = [0]
            for length in lengths:
                self._starts.append(self._starts[-1] + -(-length // self.batch))
        self._stream.draws |= state["draws"]
        for place, (inner, seen) in state["marks"].items():
            self._stream.set_mark(len(lengths), place, Mark(inner, seen))
