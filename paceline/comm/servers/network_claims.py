"""Table of steps for workers on several machines, held by rank 0 with a copy on another worker.

::

    worker 2   acquire ──────┐  change  release ───┐            ┌ continues
    rank 0                   answer: the table     ├ copy ┐  answer
    rank 1                                         └──────┘ the table, before the change is visible to any worker

The rules are those of ``comm.assignment.step_claims``. A connection takes the place of the lock in shared memory: when
the owner's connection ends, the lock is free. A change is on both machines before it is acknowledged, so the loss of
either machine loses no change.

The table comes with a log: the newest updates in the order in which all servers make them, and the distribution of the
updates' delays.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from paceline.comm.assignment.step_claims import ClaimTable
from paceline.comm.servers.rpc import Answer, RpcClient, RpcPeers, holders
from paceline.comm.values import decode, encode, sendable
from paceline.errors import WorkerLost, name_ranks

sendable(ClaimTable)
_SLICE_SECONDS = 0.1  # time after which the server answers a waiting request with "nothing has changed"
_PART_SECONDS = 5.0  # timeout for an answer from a holder while the survivors re-form


@sendable
@dataclass(frozen=True)
class Order:
    """An update that all servers make."""

    version: int  # number of the update, from 1
    step: int
    rank: int  # rank of the worker that pushed the gradients
    done: int  # number of steps done before the update
    factor: float  # factor on the learning rate


@sendable
@dataclass
class CommitLog:
    """The newest updates, and the number of updates by delay and by staleness in rounds."""

    orders: list[Order] = field(default_factory=list)
    delays: dict[int, int] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)


class _Table:
    """A holder's copy of the table. Thread-safe.

    Args:
        forward: client for the other holder.
        connected: function that returns the ranks that have a connection now: also one that has connected again.
    """

    def __init__(self, forward: RpcClient | None, connected: Callable[[], set[int]] = set) -> None:
        self._forward, self._connected = forward, connected
        self._changed = threading.Condition()
        self._text, self._changes = b"", 0
        self._owner: int | None = None
        self._closed = False
        self._arrived: set[int] = set()
        self._ended: set[int] = set()  # ranks of which a connection has ended

    def begin(self, text: bytes) -> None:
        with self._changed:
            self._owner, self._arrived = None, set()
            self._put(text)

    def read(self, rank: int, since: int, data: bytearray) -> Answer:
        """Return the table once its change count differs from ``since``, or without its text after a short wait."""
        with self._changed:
            self._changed.wait_for(lambda: self._changes != since, _SLICE_SECONDS)
            text = self._text if self._changes != since else b""
            gone = sorted(self._ended - self._connected())
            return (self._changes, text, sorted(self._arrived), gone), ()

    def acquire(self, rank: int, words: Any, data: bytearray) -> Answer:
        """Give a worker the lock and return the table, or return the lock's owner if another worker still has it."""
        with self._changed:
            self._changed.wait_for(lambda: self._owner in (None, rank), _SLICE_SECONDS)
            if self._owner not in (None, rank):
                return (self._owner, b""), ()
            self._check_open()
            self._owner = rank
            return (rank, self._text), ()

    def release(self, rank: int, text: bytes, data: bytearray) -> Answer:
        """Release the lock, and change the table if ``text`` is not empty."""
        with self._changed:
            if self._owner == rank:
                self._owner = None
                self._changed.notify_all()
            elif text:
                raise WorkerLost("the connection was lost, and with it the right to change the table of steps.")
            if text:
                self._check_open()
                self._put(text)
        return None, ()

    def copy(self, rank: int, text: bytes, data: bytearray) -> Answer:
        """Store a change that the first holder has sent."""
        with self._changed:
            self._check_open()
            self._text = text
        return None, ()

    def arrive(self, rank: int, words: Any, data: bytearray) -> Answer:
        """Record that a worker synchronizes."""
        with self._changed:
            self._arrived.add(rank)
            self._changes += 1
            self._changed.notify_all()
        return None, ()

    def close(self, rank: int, words: Any, data: bytearray) -> Answer:
        with self._changed:
            self._closed = True
            return self._text, ()

    def end(self, rank: int) -> None:
        """Release the lock of a worker whose connection has ended, and record its end."""
        with self._changed:
            self._ended.add(rank)
            if self._owner == rank:
                self._owner = None
            self._changed.notify_all()

    def _put(self, text: bytes) -> None:
        if self._forward is not None:
            try:
                self._forward.ask("table.copy", text)
            except WorkerLost:  # the next generation makes another copy
                self._forward = None
        self._text = text
        self._changes += 1
        self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise WorkerLost("another worker was lost, and the others are already re-forming.")


class LoggedCounts:
    """Delays or staleness in the log. Change the counts only inside ``NetworkClaims.change``."""

    def __init__(self, counts: Callable[[], dict[int, int]]) -> None:
        self._counts = counts

    def add(self, number: int) -> None:
        counts = self._counts()
        counts[number] = counts.get(number, 0) + 1

    def total(self) -> Counter[int]:
        return Counter(self._counts())


class NetworkClaims:
    """Access to the workers' table. All workers construct this object together, then rank 0 resets the table.

    Args:
        copies: number of workers that hold the table.

    Attributes:
        log: log of the table that was read last. Inside :meth:`change` it may be changed with the table.
        delays, rounds: number of updates in the log by delay and by staleness in rounds.
    """

    def __init__(self, peers: RpcPeers, copies: int) -> None:
        self._peers, self._world = peers, peers.world
        self._holders = holders(peers, 0, copies)
        self._table: _Table | None = None
        self.log = CommitLog()
        self.delays, self.rounds = LoggedCounts(lambda: self.log.delays), LoggedCounts(lambda: self.log.rounds)
        self._known = ClaimTable()
        self._changes = -1
        self._arrived: list[int] = []
        self._gone: list[int] = []
        if self._world.rank in self._holders:
            forward = None
            if self._world.rank == 0 and len(self._holders) > 1:
                forward = peers.new_client(self._holders[1])
            table = self._table = _Table(forward, peers.server.connected)
            for name in ("read", "acquire", "release", "copy", "arrive", "close"):
                peers.server.serve(f"table.{name}", getattr(table, name))
            peers.server.on_end(table.end)

    def begin(self, table: ClaimTable) -> None:
        """Reset the table on rank 0, while no other worker uses it. The log keeps its counts."""
        assert self._table is not None
        self._table.begin(encode((table, CommitLog([], self.log.delays, self.log.rounds))))

    def await_begin(self) -> None:
        self._world.gather(None, "step")

    def read(self) -> ClaimTable:
        self._read(-1)
        return self._known

    def wait_until(self, ready: Callable[[ClaimTable], bool], awaited: Callable[[ClaimTable], list[int]]) -> None:
        """Wait for a condition on the table.

        Args:
            awaited: returns the ranks on which the condition depends.

        Raises:
            WorkerSilent: the table has not changed for the timeout.
        """
        self._read(-1)
        begin = time.monotonic()
        while not ready(self._known):
            ranks = awaited(self._known)
            self._world.waits_for(ranks)
            self._check_alive(ranks)
            self._world.check_silence(ranks, time.monotonic() - begin)
            if self._read(self._changes):
                begin = time.monotonic()
        self._world.waits_for(())

    @contextmanager
    def change(self) -> Iterator[ClaimTable]:
        first = self._peers.client(0)
        begin = time.monotonic()
        while True:
            (owner, text), _ = first.ask("table.acquire")
            if text:
                break
            self._world.waits_for([owner])
            self._world.check_silence([owner], time.monotonic() - begin)
        self._world.waits_for(())
        table, self.log = decode(text)
        try:
            yield table
        except BaseException:
            with suppress(WorkerLost):
                first.ask("table.release", b"")
            raise
        first.ask("table.release", encode((table, self.log)))
        self._known = table

    def arrive(self) -> None:
        self._peers.client(0).ask("table.arrive")

    def missing(self) -> list[int]:
        """Return the ranks that had not called :meth:`arrive` when the table was read last."""
        return [rank for rank in range(self._world.size) if rank not in self._arrived]

    def close(self) -> ClaimTable:
        for rank in self._holders:
            if self._world.is_missing(rank):
                continue
            client = self._peers.parting(rank, _PART_SECONDS)
            try:
                text, _ = client.ask("table.close")
            except WorkerLost:
                continue
            if text:
                self._known, self.log = decode(text)
                return self._known
        raise WorkerLost(f"Rank {self._world.rank}: the workers that held the table of steps are lost.")

    def last(self) -> ClaimTable:
        return self._known

    def _check_alive(self, ranks: list[int]) -> None:
        gone = [rank for rank in ranks if rank in self._gone]
        if gone:
            self._world.check()
            named = name_ranks(gone)
            lost = WorkerLost(f"Rank {self._world.rank} lost {named}. See the output of {named} for the cause.")
            raise self._world.explain(lost)

    def _read(self, since: int) -> bool:
        (changes, text, self._arrived, self._gone), _ = self._peers.client(0).ask("table.read", since)
        if text:
            self._known, self.log = decode(text)
        changed: bool = changes != since
        self._changes = changes
        return changed
