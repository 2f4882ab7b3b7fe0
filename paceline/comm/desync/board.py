"""Boards to which each worker publishes its latest calls, readable by the others even if it is blocked or dead.

A call is published before it is made, because gloo ends a process that receives more bytes than it expects (SIGABRT).
On one machine the records are in shared memory, where a worker immediately sees that another worker's call differs. On
several machines they go to the store of the rendezvous.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from paceline.comm.desync.compare import Record

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from paceline.comm.shm.arena import SharedMemory

ALL, SOME = 0, 1
"""Kinds of records: calls in the group of all workers, which have the same number on every worker, and others."""

KEPT = (64, 32)  # number of kept calls of each kind

_BYTES = 512
_HASH_BITS = 44
_HASH, _NUMBERS = (1 << _HASH_BITS) - 1, (1 << 19) - 1
_POLL_SECONDS = 0.002
_READ_SECONDS = 2.0


class Board(Protocol):
    """Interface to the latest calls of all workers."""

    immediate: bool  # whether published calls are visible immediately, so that :meth:`differs` can compare them

    def publish(self, number: int, mark: int, text: bytes) -> bool:
        """Publish a call in the group of all workers and return whether it differs, as :meth:`differs` does."""

    def publish_in_group(self, slot: int, text: bytes) -> None:
        """Publish a call in a smaller group. ``slot`` counts the calls in all smaller groups."""

    def differs(self, number: int, mark: int) -> bool:
        """Return whether another worker is known to have made a different call with this number. This is cheap."""

    def barrier(self, number: int, seconds: float) -> None:
        """Wait at most ``seconds`` until the other workers have published a call with this number."""

    def linger(self, seconds: float) -> None:
        """Wait at most ``seconds`` until the others have read the calls, because this worker may hold the store."""

    def read(self, numbers: range, others: bool) -> dict[int, list[Record]]:
        """Return the records of reachable workers: at least these numbers, and smaller groups if ``others``."""


def line(record: Record) -> bytes:
    """Return a record as bytes, without its number, shortened to fit."""
    ranks = "" if record["ranks"] is None else ",".join(map(str, record["ranks"]))
    fields = record["group"][:60], ranks[:100], record["call"][:160], record["note"][:20], "<".join(record["sites"])
    plain = "\t".join(field.replace("\t", " ").replace("\n", " ") for field in fields)
    return b"\t" + plain.encode(errors="replace")[: _BYTES - 24] + b"\n"


def parse(text: bytes) -> Record | None:
    """Parse a record from its number and line. Return None if the text is incomplete."""
    number, *fields = text.partition(b"\n")[0].decode(errors="replace").split("\t")
    if len(fields) != 5 or not number.isdigit():
        return None
    group, ranks, call, note, sites = fields
    members = [int(rank) for rank in ranks.split(",") if rank] if group else None
    return Record(
        number=int(number), group=group, ranks=members, call=call, note=note, sites=sites.split("<") if sites else []
    )


class SharedMemoryBoard:
    """Board in the shared memory of one machine, with a text and a mark for each call.

    The mark holds the number and the hash of a call in the group of all workers, so a comparison reads one integer.
    """

    immediate = True

    def __init__(self, shared_memory: SharedMemory, rank: int) -> None:
        self._blocks = shared_memory.share(8 * KEPT[ALL] + sum(KEPT) * _BYTES)
        self._marks = [memoryview(block).cast("q") for block in self._blocks]
        self._own = self._blocks[rank]
        self._own[:] = bytes(len(self._own))  # the block may have been used before
        self._own_marks = self._marks[rank]
        self._others = [marks for place, marks in enumerate(self._marks) if place != rank]

    def publish(self, number: int, mark: int, text: bytes) -> bool:
        slot = number % KEPT[ALL]
        start = 8 * KEPT[ALL] + slot * _BYTES
        self._own[start : start + len(text)] = text
        self._own_marks[slot] = (number & _NUMBERS) << _HASH_BITS | mark & _HASH
        return self.differs(number, mark)

    def publish_in_group(self, slot: int, text: bytes) -> None:
        start = 8 * KEPT[ALL] + (KEPT[ALL] + slot % KEPT[SOME]) * _BYTES
        self._own[start : start + len(text)] = text

    def differs(self, number: int, mark: int) -> bool:
        slot = number % KEPT[ALL]
        own = (number & _NUMBERS) << _HASH_BITS | mark & _HASH
        return any(marks[slot] != own and marks[slot] >> _HASH_BITS == own >> _HASH_BITS for marks in self._others)

    def barrier(self, number: int, seconds: float) -> None:
        place, slot = number & _NUMBERS, number % KEPT[ALL]
        deadline = time.monotonic() + seconds
        while any(marks[slot] >> _HASH_BITS < place for marks in self._others) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def linger(self, seconds: float) -> None:
        pass  # the shared memory outlives each worker

    def read(self, numbers: range, others: bool) -> dict[int, list[Record]]:
        starts = range(8 * KEPT[ALL], 8 * KEPT[ALL] + sum(KEPT) * _BYTES, _BYTES)
        return {
            rank: _whole([bytes(block[at : at + _BYTES]) for at in starts]) for rank, block in enumerate(self._blocks)
        }


class StoreBoard:
    """Board in the store of the rendezvous. Publishing takes a few microseconds, without waiting for the store."""

    immediate = False

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def publish(self, number: int, mark: int, text: bytes) -> bool:
        self._set(self._key(self._rank, ALL, number), text)
        return False

    def publish_in_group(self, slot: int, text: bytes) -> None:
        self._set(self._key(self._rank, SOME, slot), text)

    def _set(self, key: str, text: bytes) -> None:
        with contextlib.suppress(dist.DistError, RuntimeError):  # the store's host is lost: the call itself will fail
            self._store.set(key, text.decode())

    def differs(self, number: int, mark: int) -> bool:
        return False

    def barrier(self, number: int, seconds: float) -> None:
        deadline, pause = time.monotonic() + seconds, _POLL_SECONDS / 8
        waiting = [rank for rank in range(self._size) if rank != self._rank]
        with contextlib.suppress(dist.DistError, RuntimeError):
            while waiting and time.monotonic() < deadline:
                waiting = [rank for rank in waiting if not self._reached(rank, number)]
                time.sleep(pause if waiting else 0)
                pause = min(2 * pause, 10 * _POLL_SECONDS)

    def linger(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with contextlib.suppress(dist.DistError, RuntimeError):
            self._store.set(f"calls/{self._rank}/read", "")
            keys = [f"calls/{rank}/read" for rank in range(self._size)]
            while not self._store.check(keys) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)

    def _reached(self, rank: int, number: int) -> bool:
        key = self._key(rank, ALL, number)
        record = parse(self._store.get(key)) if self._store.check([key]) else None
        return record is not None and record["number"] >= number

    def _key(self, rank: int, kind: int, number: int) -> str:
        return f"calls/{rank}/{kind}/{number % KEPT[kind]}"

    def read(self, numbers: range, others: bool) -> dict[int, list[Record]]:
        """Read in a thread, because an unreachable store would block this worker until its timeout."""
        found: dict[int, list[Record]] = {}
        reading = threading.Thread(target=self._read, args=(numbers, others, found), daemon=True)
        reading.start()
        reading.join(_READ_SECONDS)
        return dict(found)

    def _read(self, numbers: range, others: bool, found: dict[int, list[Record]]) -> None:
        if len(numbers) > 1 or others:  # the latest records may not have arrived
            self.barrier(numbers.stop - 1, _READ_SECONDS / 4)
        places = [(ALL, number) for number in numbers[-KEPT[ALL] :]]
        places += [(SOME, slot) for slot in range(KEPT[SOME]) if others]
        with contextlib.suppress(dist.DistError, RuntimeError):
            for rank in range(self._size):
                keys = [self._key(rank, kind, place) for kind, place in places]
                found[rank] = _whole([self._store.get(key) for key in keys if self._store.check([key])])


def _whole(texts: list[bytes]) -> list[Record]:
    """Return the complete records, oldest first in each group."""
    records = [record for record in map(parse, texts) if record is not None]
    return sorted(records, key=lambda record: (record["group"], record["number"]))
