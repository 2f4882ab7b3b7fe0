"""Chunks of a data set for evaluation, which do not depend on the number of workers.

::

    data set     0 1 2 3 │ 4 5 6 7 │ 8 9 10        known length: chunks of similar size, contiguous on each worker
    stream       0 1 2 3 │ 4 5 6 7 │ 8 9 10 11 │ 12   every worker reads all samples; worker c modulo P has chunk c
    token rows   0 4 8 │ 1 5 9 │ 2 6 10 │ 3 7 11   with a carried state: a worker has all segments of its rows
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from paceline.data.comparison import facts_of
from paceline.data.keys import COLLATE, seed_all, seed_of
from paceline.data.loading.prefetch import to_device
from paceline.data.loading.samples import KeyedDataset, LoadRequest, collated
from paceline.data.located.shards import Located
from paceline.data.nested import default_collate
from paceline.data.recurrent.carried import CarriedState
from paceline.data.recurrent.token_rows import TokenRows
from paceline.data.source import refuse_columns
from paceline.data.streams.reader import Stream, is_stream
from paceline.errors import InputError
from paceline.schedule.shares import even
from paceline.step.context import TrainingContext

_LARGEST = 128
_EPOCH = -1


class Chunk(NamedTuple):
    """Samples on the device: the index of the chunk, the number of samples, and their data."""

    number: int
    samples: int
    data: Any


class Chunks:
    """Chunks of a data set or of a stream.

    Attributes:
        samples: number of samples. For a stream it is known once the stream has been read.

    Raises:
        InputError: the data set has no samples, or is neither map-style nor iterable.
    """

    def __init__(self, context: TrainingContext, data: Any, what: str) -> None:
        if isinstance(data, DataLoader) and data.batch_sampler is not None:
            raise InputError(
                f"{what} makes batches by itself, and would take each batch of this DataLoader for one sample: give "
                f"it loader.dataset, a {type(data.dataset).__name__}."
            )
        if isinstance(data, Located):
            raise InputError(
                f"{what} divides its samples among all workers, but of Located data each worker has its own only: give "
                f"it a data set that every worker has."
            )
        refuse_columns(what, data)
        self._context, self._data = context, data
        self._is_stream = is_stream(data)
        self.samples = 0
        if self._is_stream:
            return
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise InputError(
                f"{what} needs a data set with a length and items by number, or one that can be iterated over, not "
                f"this {type(data).__name__}."
            )
        self.samples = len(data)
        if self.samples == 0:
            raise InputError(f"{what}: the data set, a {type(data).__name__}, has no samples (its length is 0).")
        self._read = KeyedDataset(data, context.settings.seed, collates=context.collate is not None)

    def facts(self) -> dict[str, object]:
        """Return the values on which all workers must agree. For a stream, call this after it has been read."""
        return {"data length": self.samples} | facts_of(self._data, exact=bool(self._context.settings.exact))

    def of(self, rank: int, size: int) -> Iterator[Chunk]:
        """Load the chunks of worker ``rank`` among ``size`` workers."""
        if self._is_stream:
            return self._of_stream(rank, size)
        if self._context.compute.carried is not None and isinstance(self._data, TokenRows):
            return self._of_rows(self._context.compute.carried, self._data, rank, size)
        return self._of_data_set(rank, size)

    def _of_data_set(self, rank: int, size: int) -> Iterator[Chunk]:
        chunks = even(self.samples, -(-self.samples // self._length))
        own = even(len(chunks), size)[rank]
        for number in own:
            samples = list(chunks[number])
            yield self._chunk(number, len(samples), self._read.__getitems__(LoadRequest(_EPOCH, samples)))

    def _of_rows(self, carried: CarriedState, data: TokenRows, rank: int, size: int) -> Iterator[Chunk]:
        """Load consecutive segments of the same rows, so that the carried state continues from segment to segment."""
        parts = even(data.rows, min(self._context.order.microbatches, data.rows))
        segments = len(data) // data.rows
        for part in even(len(parts), size)[rank]:
            with carried.along():
                for segment in range(segments):
                    samples = [segment * data.rows + row for row in parts[part]]
                    items = self._read.__getitems__(LoadRequest(_EPOCH, samples))
                    yield self._chunk(segment * len(parts) + part, len(samples), items)

    def _of_stream(self, rank: int, size: int) -> Iterator[Chunk]:
        data = self._data
        before = copy.deepcopy(data.state_dict()) if hasattr(data, "load_state_dict") else None
        stream = Stream(data, self._context.settings.seed, self._length, drop_last=False)
        number, last = 0, False
        try:
            while not last:
                items, last = stream.batch(0, number)
                self.samples += len(items)
                if number % size == rank:
                    if self._context.collate is not None:
                        seed_all(seed_of(COLLATE, self._context.settings.seed, _EPOCH, number))
                    yield self._chunk(number, len(items), items)
                number += 1
        finally:
            if before is not None:
                data.load_state_dict(before)

    @property
    def _length(self) -> int:
        order = self._context.order
        return max(-(-order.batch // order.microbatches), min(order.batch, _LARGEST))

    def _chunk(self, number: int, samples: int, items: Any) -> Chunk:
        data = collated(items, self._context.collate or default_collate)
        return Chunk(number, samples, to_device(data, self._context.world.device))
