"""Data set that grows during training, and the store of the samples that were added to it.

::

    number    0 1 2 3 │ 4 5 6 7 8 │ 9 10 ...
              initial │ block 0   │ block 1       at most BLOCK_BYTES each; a checkpoint has the blocks as tensors

Added samples are kept encoded (``comm.values``), one after the other, and each read decodes a new copy. Where a block
ends follows from the sizes of the samples alone, so workers with the same samples have the same blocks.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from paceline.comm.values import decode
from paceline.errors import InputError

BLOCK_BYTES = 1 << 22
"""Largest block of more than one sample. Workers that write a checkpoint divide the blocks among them."""


class _Block:
    """Encoded samples, and where each of them ends."""

    def __init__(self) -> None:
        self.data, self.ends = bytearray(), array("q")

    def add(self, sample: bytes) -> None:
        self.data += sample
        self.ends.append(len(self.data))

    def range_of(self, start: int, stop: int) -> tuple[int, int]:
        """Return where the bytes of some samples begin and end."""
        return self.ends[start - 1] if start else 0, self.ends[stop - 1]

    def tensors(self, start: int, stop: int, *, is_full: bool) -> list[torch.Tensor]:
        """Return the bytes of some samples, and their sizes. A block that is not full may grow, so it is copied."""
        begin, end = self.range_of(start, stop)
        data = memoryview(self.data if is_full else self.data[:end])
        return [
            torch.frombuffer(data[begin:end], dtype=torch.uint8),
            torch.tensor([begin, *self.ends[start:stop]]).diff(),
        ]


class Store:
    """Encoded samples in the order in which they were added."""

    def __init__(self) -> None:
        self.count = 0
        self._blocks: list[_Block] = []
        self._firsts: list[int] = []  # number of the first sample of each block

    def add(self, samples: Iterable[bytes]) -> None:
        """Append encoded samples."""
        for sample in samples:
            if not self._blocks or len(self._blocks[-1].data) + len(sample) > BLOCK_BYTES:
                self._blocks.append(_Block())
                self._firsts.append(self.count)
            self._blocks[-1].add(sample)
            self.count += 1

    def read(self, number: int) -> Any:
        """Return a new copy of a sample."""
        place = bisect_right(self._firsts, number) - 1
        block, index = self._blocks[place], number - self._firsts[place]
        begin, end = block.range_of(index, index + 1)
        return decode(memoryview(block.data)[begin:end])

    def tensors(self, start: int, stop: int) -> list[list[torch.Tensor]]:
        """Return the samples ``start`` to ``stop`` (exclusive) as tensors, block by block: their bytes and sizes."""
        found = []
        for place, (first, block) in enumerate(zip(self._firsts, self._blocks, strict=True)):
            begin, end = max(0, start - first), min(len(block.ends), stop - first)
            if begin < end:
                found.append(block.tensors(begin, end, is_full=place < len(self._blocks) - 1))
        return found


def samples_in(blocks: Iterable[list[torch.Tensor]]) -> Iterator[bytes]:
    """Yield the encoded samples in the tensors that :meth:`Store.tensors` returned."""
    for data, sizes in blocks:
        held, end = data.numpy().tobytes(), 0
        for size in sizes.tolist():
            yield held[end : end + size]
            end += size


class Growing(Dataset[Any]):
    """Data set to which :meth:`paceline.Session.extend` adds samples during training.

    The epoch that is running keeps its samples; the next epoch has the added ones, too. ``len()`` counts the
    samples that the script has added up to its position, even in a resumed run and on a worker that joins.

    Args:
        samples: samples before training: a data set with a length and items by number. Defaults to none; then the first
            call of ``extend`` comes before the first batch.

    Raises:
        InputError: ``samples`` has no length or no items by number.
    """

    def __init__(self, samples: Any = ()) -> None:
        known = isinstance(samples, Sized) and hasattr(samples, "__getitem__")
        if not known or isinstance(samples, str | bytes | IterableDataset | Growing):
            raise InputError(
                f"Growing takes the samples before training as a data set with a length and items by number, such as a "
                f"list, but it got a {type(samples).__name__}. To begin without samples give none: Growing()."
            )
        self.initial, self.added = samples, Store()
        # number of added samples at the position of the script
        self.visible: Callable[[], int] = lambda: self.added.count

    def __len__(self) -> int:
        return len(self.initial) + self.visible()

    def __getitem__(self, sample: int) -> Any:
        initial = len(self.initial)
        if not 0 <= sample < initial + self.added.count:
            raise IndexError(f"sample {sample} of {initial + self.added.count}")
        return self.initial[sample] if sample < initial else self.added.read(sample - initial)

    def __iter__(self) -> Iterator[Any]:
        return (self[sample] for sample in range(len(self)))
