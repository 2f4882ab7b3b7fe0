"""Reading of the streams that this worker has, which all workers tell each other about.

Each worker reads ahead of training in all of its streams, and reports how far they continue, or where they end. So all
know the microbatches of the next steps, whichever worker has them. A stream that several workers have is read by each.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.comm.values import check
from paceline.data.located.shards import naming
from paceline.data.located.turns import Reading
from paceline.data.order import UNKNOWN
from paceline.data.streams.reader import Mark, Stream, StreamBatch
from paceline.errors import DisagreementError, InputError

Place = tuple[int, int]
"""Epoch, and index of a microbatch in its stream."""


class ShardReader:
    """Microbatches of a stream.

    Args:
        size: largest number of samples in a microbatch.
    """

    def __init__(self, name: str, data: Any, seed: int, size: int) -> None:
        own = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
        self._name, self._size = name, size
        self._stream = Stream(data, int.from_bytes(own, "little"), size, drop_last=False, keeps=UNKNOWN)
        if hasattr(data, "__next__"):  # an iterator may be exhausted after one pass
            with self._named("first sample"):
                self._stream.check_repeats()

    def items(self, epoch: int, place: int, size: int | None = None) -> list[Any]:
        """Return copies of the samples of a microbatch, which may be changed.

        Args:
            size: number of samples that it had on the workers that have read it before. Defaults to any.
        """
        items = self._batch(epoch, place).items
        if size is not None and len(items) != size:
            raise InputError(
                f"Shard {self._name!r} gives {len(items)} samples from sample {place * self._size} of epoch {epoch} "
                f"on, where it gave {size} before. Every worker that has it, and every resumed run, must read the same "
                f"samples in the same order."
            )
        return [copy.copy(item) if isinstance(item, dict | list) else item for item in items]

    def read_to(self, known: Reading, epoch: int, rounds: int, position: Place, oldest: Place) -> Reading:
        """Read the microbatches of some rounds of an epoch, and return the new reading.

        Args:
            position: microbatch at which a resumed run would begin now.
            oldest: first microbatch that is still needed.
        """
        self._stream.forget(*oldest)
        place, is_last = known.seen // self._size, len(known.ends) > epoch
        while place < rounds and not is_last:
            try:
                items, is_last = self._batch(epoch, place)
            except InputError:
                if not self._stream.is_empty:
                    raise
                return known._replace(is_empty=True)  # an error only if training comes to this epoch
            begin = self._stream.mark(epoch, place)
            known = known._replace(seen=known.seen + len(items), digest="" if begin is None else begin.digest)
            place += 1
            if is_last:
                known = known._replace(ends=[*known.ends, known.seen], seen=0)
        # a run that resumes later, maybe in a later epoch, reads on from the last of these before it
        places = {position, *((one, 0) for one in range(position[0], epoch + 2))}
        found = [(at, mark) for at in sorted(places) if (mark := self._stream.mark(*at)) is not None]
        marks = [(*at, _sendable(mark.state), mark.digest) for at, mark in found]
        return known._replace(marks=marks or known.marks, draws=self._stream.draws)

    def _batch(self, epoch: int, place: int) -> StreamBatch:
        with self._named(f"microbatch {place} of epoch {epoch}"):
            return self._stream.batch(epoch, place)

    @contextmanager
    def _named(self, samples: str) -> Iterator[None]:
        try:
            with naming(self._name, samples):
                yield
        except InputError as error:
            raise InputError(f"Shard {self._name!r}: {error}") from None

    def begin_from(self, known: Reading) -> None:
        """Use the reading of others, to begin at their position in the stream."""
        self._stream.draws |= known.draws
        for epoch, place, state, digest in known.marks:
            if self._stream.mark(epoch, place) is None:
                self._stream.set_mark(epoch, place, Mark(state, digest))


def _sendable(state: object) -> object:
    """Return a state of a data set, or None if it cannot be sent: then the samples before it are read instead."""
    try:
        check(state)
    except TypeError:
        return None
    return state


def agreed(everyone: Sequence[Mapping[str, Reading]]) -> dict[str, Reading]:
    """Return the common reading of each stream from those of its workers, in rank order.

    Raises:
        DisagreementError: a stream is not the same on two workers.
    """
    found = dict[str, tuple[int, Reading]]()
    for rank, own in enumerate(everyone):
        for name, reading in own.items():
            first, known = found.setdefault(name, (rank, reading))
            if known._replace(marks=[]) != reading._replace(marks=[]):
                left, right = _progress(known), _progress(reading)
                raise DisagreementError(
                    f"Shard {name!r} is not the same on rank {first} and rank {rank}: "
                    f"{f'{left} and {right}' if left != right else f'{left}, but other values'}. The order of a stream "
                    f"may follow from the epoch (set_epoch) and from the global generators of torch, random and numpy, "
                    f"which are keyed; not from the rank, the machine, or the time."
                )
    return {name: reading for name, (_, reading) in found.items()}


def _progress(one: Reading) -> str:
    if one.seen or one.is_empty:
        return f"{'no' if one.is_empty else f'more than {one.seen}'} samples in epoch {len(one.ends)}"
    return f"{one.ends[-1]} samples in epoch {len(one.ends) - 1}"
