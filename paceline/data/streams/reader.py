"""Reader of a stream of unknown length, batch by batch and identical on every worker.

::

    epoch e     iter(data) ─ 0 1 2 3 │ 4 5 6 7 │ 8 9        the n-th sample of an epoch is its sample n
    batch       (e, 0) ──────────────┘ (e, 1) ─┘ (e, 2)     the last one: there is no sample after it

Every worker reads all samples in the same order, and computes with its share of them. Random numbers that the data set
draws are keyed by (seed, epoch, n), so they do not depend on where reading began. The reader reads one sample past each
batch, with ``drop_last`` a whole batch, to find out whether the batch is the last batch of its epoch.

To start in the middle of an epoch, the reader loads the state that the data set's ``state_dict`` returned at that
batch. Some states do not lead to the right samples, because they omit a buffer. So a digest of the next sample is kept
with each state and compared. If it differs, or there is no state, the epoch is read again from its start.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import IterableDataset

from paceline.data.keys import SAMPLE, seed_all, seed_of, seed_untouched, was_drawn
from paceline.data.tables.engines import writer_of
from paceline.errors import InputError

_log = logging.getLogger("paceline")
_BATCHES = 4
_LONG_SECONDS = 5.0
_END = object()


def is_stream(data: Any) -> bool:
    """Return whether samples can only be read in sequence. torch's class has an ``__getitem__`` that raises."""
    if isinstance(data, IterableDataset):
        return True
    return isinstance(data, Iterable) and not hasattr(data, "__getitem__") and writer_of(data) is None


class StreamBatch(NamedTuple):
    """Samples of a batch, and whether it is the last batch of its epoch."""

    items: list[Any]
    last: bool


class Mark(NamedTuple):
    """Start of a batch: the data set's state before the first sample (None if unknown) and a digest of that sample.

    The digest is empty while it is unknown.
    """

    state: Any
    digest: str


class Stream:
    """Batches of an iterable data set.

    Args:
        data: iterable data set that yields its samples again for each ``iter(data)``. Its ``set_epoch(epoch)``, if it
            has that method, is called before each epoch.
    """

    def __init__(self, data: Any, seed: int, batch: int, drop_last: bool, keeps: int = _BATCHES) -> None:
        self._data, self._seed, self._batch, self._keeps = data, seed, batch, keeps
        self._ahead = batch if drop_last else 1
        self._has_state = self._states_lead = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
        self._initial = copy.deepcopy(data.state_dict()) if self._has_state else None
        self._batches: dict[tuple[int, int], StreamBatch] = {}
        self._marks: dict[tuple[int, int], Mark] = {}
        self.draws = False  # whether the data set is known to draw from a global generator
        self._close()

    def batch(self, epoch: int, index: int) -> StreamBatch:
        """Return a batch of an epoch. The batch must exist.

        Raises:
            InputError: the epoch has no samples or too few for a batch, or its samples differ from an earlier read.
        """
        while (epoch, index) not in self._batches:
            if not self.draws:
                seed_untouched()
            if self._iterator is None or epoch != self._epoch or index < self._index:
                self._open(epoch, index)
            self._read()
        return self._batches[epoch, index]

    @property
    def is_empty(self) -> bool:
        """Whether the epoch that was read last has no samples."""
        return self._ended and not self._count

    def mark(self, epoch: int, index: int) -> Mark | None:
        """Return the start of a batch, or None if the batch is not among those read last."""
        return self._marks.get((epoch, index))

    def set_mark(self, epoch: int, index: int, mark: Mark) -> None:
        """Set the start of a batch, from which reading can begin if the data set can load its state."""
        self._marks[epoch, index] = mark
        if mark.state is not None and (epoch, index) > (self._epoch, self._index):
            self._close()  # else the samples up to there would be read

    def check_repeats(self) -> None:
        """Read the first sample again to check that the data set can be iterated over more than once."""
        first = self.batch(0, 0).items[0]
        self._batches.clear()
        self._marks.clear()
        self._open(0, 0)
        self._pull()
        if not self._pending or digest(self._pending[0]) != digest(first):
            raise InputError(
                f"This {type(self._data).__name__} gives its samples only once, but each epoch, and a resumed run, "
                f"reads them again. Give an object whose __iter__ begins again: a class whose __iter__ is a generator "
                f"function, or a list."
            )

    def _close(self) -> None:
        self._iterator: Iterator[Any] | None = None
        self._epoch, self._index = -1, 0  # epoch and index of the next batch
        self._count = 0  # number of samples of the epoch that have been read
        self._ended = False
        self._state: Any = None
        self._by_state = False
        self._pending: deque[Any] = deque()

    def _open(self, epoch: int, index: int) -> None:
        """Start reading an epoch so that batch ``index`` comes next. Reading skips the samples before it."""
        known = [place for (of, place), mark in self._marks.items() if of == epoch and mark.state is not None]
        most = index if self._states_lead else 0
        begin = max((place for place in known if place <= most), default=None)
        follows = self._ended and epoch == self._epoch + 1 and not begin
        self._close()
        if self._has_state:
            self._state = self._initial if begin is None else self._marks[epoch, begin].state
            if not follows:
                self._data.load_state_dict(copy.deepcopy(self._state))
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(epoch)
        self._by_state = bool(begin)
        self._epoch, self._index, self._count = epoch, index, (begin or 0) * self._batch
        self._key()
        self._iterator = iter(self._data)

    def _read(self) -> None:
        """Read the next batch."""
        begin, first = time.perf_counter(), self._count
        while not self._ended and len(self._pending) < self._batch + self._ahead:
            self._pull()
            if self._count <= self._index * self._batch:
                self._pending.clear()
        if time.perf_counter() - begin > _LONG_SECONDS and first < self._index * self._batch:
            _log.warning(
                "read past %d samples of the stream to continue in the middle of epoch %d; a data set with state_dict "
                "and load_state_dict spares that",
                *(self._index * self._batch - first, self._epoch),
            )
        if not self.draws and was_drawn():
            self._draw_with_keys()
            return
        items = [self._pending.popleft() for _ in range(min(self._batch, len(self._pending)))]
        if self._index == 0 and len(items) < self._ahead:
            raise self._too_few(len(items))
        self._batches[self._epoch, self._index] = StreamBatch(items, len(self._pending) < self._ahead)
        self._index += 1
        for place in [place for place in self._batches if place != (0, 0)][: -self._keeps]:
            del self._batches[place]
        for place in [place for place in self._marks if place != (self._epoch, 0)][: -2 * self._keeps]:
            del self._marks[place]

    def forget(self, epoch: int, index: int) -> None:
        """Drop the batches before a batch, except for the first batch of the run."""
        for place in [place for place in self._batches if (0, 0) < place < (epoch, index)]:
            del self._batches[place]
        for place in [place for place in self._marks if place < (epoch, index) and place != (epoch, 0)]:
            del self._marks[place]

    def _draw_with_keys(self) -> None:
        """Go back to the current batch, to read it again with keys. Earlier batches drew no random numbers."""
        self.draws, here = True, (self._epoch, self._index)
        for place in [place for place in self._marks if place >= here]:
            mark = self._marks.pop(place)
            if place == here:
                self._marks[place] = mark._replace(digest="")
        self._open(*here)

    def _too_few(self, count: int) -> InputError:
        if count:
            return InputError(
                f"The stream gave {count} samples in epoch {self._epoch}, less than one batch of {self._batch}, and "
                f"drop_last leaves nothing."
            )
        return InputError(
            f"The stream gave no samples in epoch {self._epoch}. Each epoch iterates over data again: an object that "
            f"is used up after one pass must begin again in __iter__."
        )

    def _pull(self) -> None:
        """Read the next sample."""
        assert self._iterator is not None
        self._key()
        item = next(self._iterator, _END)
        if self._count % self._batch == 0 and not self._is_expected(item):
            self._open(self._epoch, self._index)
            return
        if item is _END:
            self._ended = True
            if self._has_state:
                self._marks[self._epoch + 1, 0] = Mark(copy.deepcopy(self._data.state_dict()), "")
            return
        self._count += 1
        self._pending.append(item)
        if self._states_lead and self._count % self._batch == 0:
            self._state = copy.deepcopy(self._data.state_dict())

    def _key(self) -> None:
        if self.draws:
            seed_all(seed_of(SAMPLE, self._seed, self._epoch, self._count))

    def _is_expected(self, item: Any) -> bool:
        """Record the start of a batch. Return False if the data set's state did not lead to the right sample."""
        place = self._epoch, self._count // self._batch
        state = self._state if self._states_lead or place[1] == 0 else None
        now, before = Mark(state, digest(item)), self._marks.get(place)
        if before is None or before.digest in ("", now.digest):
            if item is not _END:
                self._marks[place] = now
            return True
        if not self._by_state:
            raise InputError(
                f"The stream gives another sample {self._count} in epoch {self._epoch} than it gave before, so the "
                f"batches would not be the same on all workers and after a resume. Its order may follow from the epoch "
                f"(set_epoch) and from the global generators of torch, random and numpy, which are keyed; not from the "
                f"rank, the time, or a generator that continues from pass to pass."
            )
        _log.warning(
            "the state_dict of the %s does not lead to the samples that follow, as with a shuffle buffer that is not "
            "in it: the samples before them are read again",
            type(self._data).__name__,
        )
        self._states_lead = False
        return False


def digest(item: Any) -> str:
    """Return a hash of the visible values of a sample. Equal values have equal hashes in all processes."""
    seen = hashlib.blake2b(digest_size=12)
    _add(seen, item)
    return seen.hexdigest()


def _add(seen: Any, item: Any) -> None:
    seen.update(type(item).__name__.encode())
    if isinstance(item, torch.Tensor):
        item = item.detach().cpu()
        seen.update(str((item.dtype, tuple(item.shape))).encode())
        if item.layout == torch.strided:
            item = item.resolve_conj().resolve_neg()
            seen.update(item.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(item, numpy.ndarray | numpy.generic):
        seen.update(str((item.dtype, item.shape)).encode())
        seen.update(item.tobytes() if not item.dtype.hasobject else b"")
    elif isinstance(item, str | bytes | bytearray | bool | int | float | complex | None):
        seen.update(repr(item).encode())
    elif isinstance(item, Mapping):
        for key in sorted(item, key=repr):
            _add(seen, key)
            _add(seen, item[key])
    elif isinstance(item, list | tuple):
        for one in item:
            _add(seen, one)
    elif hasattr(item, "tobytes"):  # an image
        seen.update(item.tobytes())
