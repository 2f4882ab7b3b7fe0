"""The table of steps of workers on several machines: who is at which step, at one of them, with a copy at another.

::

    worker 2   acquire ──────┐  change  release ───┐            ┌ goes on
    rank 0                   answer: the table     ├ copy ┐  answer
    rank 1                                         └──────┘ the table, before anybody knows of the change

The rules are those of ``comm.assignment.step_claims``. What a lock in shared memory does, a connection does here: when
its worker goes away, the lock is free. A change is on both machines before it is acknowledged, so the loss of either
loses none.

Beside the table there is a log: the newest updates in the order in which all servers make them, and how old the
weights of all updates were.
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
_SLICE_SECONDS = 0.1
"""How long a request waits at the server before it answers that nothing has changed."""
_PART_SECONDS = 5.0
"""For a worker that does not answer when the others part."""


@sendable
@dataclass(frozen=True)
class Order:
    """An update that all servers make.

    Attributes:
        version: its number, from 1.
        step: whose gradients it applies.
        rank: of the worker that has pushed them.
        done: how many steps were done before.
        factor: of the learning rate.
    """

    version: int
    step: int
    rank: int
    done: int
    factor: float


@sendable
@dataclass
class CommitLog:
    """The newest updates, and how often each delay, and each number of rounds, has been."""

    orders: list[Order] = field(default_factory=list)
    delays: dict[int, int] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)


class _Table:
    """The table as one of its holders has it; any thread may use it."""

    def __init__(self, forward: RpcClient | None) -> None:
        self._forward = forward
        self._changed = threading.Condition()
        self._text, self._changes = b"", 0
        self._owner: int | None = None
        self._closed = False
        self._arrived: set[int] = set()
        self._gone: set[int] = set()

    def begin(self, text: bytes) -> None:
        """Start anew."""
        with self._changed:
            self._owner, self._arrived = None, set()
            self._put(text)

    def look(self, rank: int, since: int, data: bytearray) -> Answer:
        """The table, as soon as it is not that of ``since`` any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._changes != since, _SLICE_SECONDS)
            text = self._text if self._changes != since else b""
            return (self._changes, text, sorted(self._arrived), sorted(self._gone)), ()

    def acquire(self, rank: int, words: Any, data: bytearray) -> Answer:
        """The table, for a worker that alone may change it; nothing if another one still may, and who."""
        with self._changed:
            self._changed.wait_for(lambda: self._owner in (None, rank), _SLICE_SECONDS)
            if self._owner not in (None, rank):
                return (self._owner, b""), ()
            self._check_open()
            self._owner = rank
            return (rank, self._text), ()

    def release(self, rank: int, text: bytes, data: bytearray) -> Answer:
        """Change it, or leave it as it is."""
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
        """A change at the first holder."""
        with self._changed:
            self._check_open()
            self._text = text
        return None, ()

    def arrive(self, rank: int, words: Any, data: bytearray) -> Answer:
        """A worker synchronizes."""
        with self._changed:
            self._arrived.add(rank)
            self._changes += 1
            self._changed.notify_all()
        return None, ()

    def close(self, rank: int, words: Any, data: bytearray) -> Answer:
        """The last table: nobody changes it any more."""
        with self._changed:
            self._closed = True
            return self._text, ()

    def end(self, rank: int) -> None:
        """A worker went away: it changes nothing any more."""
        with self._changed:
            self._gone.add(rank)
            if self._owner == rank:
                self._owner = None
            self._changed.notify_all()

    def _put(self, text: bytes) -> None:
        if self._forward is not None:
            try:
                self._forward.ask("table.copy", text)
            except WorkerLost:  # the next generation has another copy
                self._forward = None
        self._text = text
        self._changes += 1
        self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise WorkerLost("another worker was lost, and the others are already re-forming.")


class LoggedCounts:
    """One of the two counts of the log; to be changed inside ``NetworkClaims.change``."""

    def __init__(self, counts: Callable[[], dict[int, int]]) -> None:
        self._counts = counts

    def add(self, number: int) -> None:
        """Count a number once more."""
        counts = self._counts()
        counts[number] = counts.get(number, 0) + 1

    def total(self) -> Counter[int]:
        """The counts of all workers, as they were last read."""
        return Counter(self._counts())


class NetworkClaims:
    """The table of these workers; all of them make it together, then rank 0 begins it.

    Args:
        peers: the servers of the workers.
        copies: how many of them hold the table.

    Attributes:
        log: of the table that was read last; inside :meth:`change` to be changed with it.
        delays, rounds: the counts in it.
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
            table = self._table = _Table(forward)
            for name in ("look", "acquire", "release", "copy", "arrive", "close"):
                peers.server.serve(f"table.{name}", getattr(table, name))
            peers.server.on_end(table.end)

    def begin(self, table: ClaimTable) -> None:
        """Start anew, at rank 0, while the others do nothing with the table."""
        assert self._table is not None
        self._table.begin(encode((table, CommitLog([], self.log.delays, self.log.rounds))))

    def await_begin(self) -> None:
        """Until all workers can go on from the new start."""
        self._world.gather(None, "step")

    def look(self) -> ClaimTable:
        """The table as it is now."""
        self._look(-1)
        return self._known

    def wait_until(self, ready: Callable[[ClaimTable], bool], awaited: Callable[[ClaimTable], list[int]]) -> None:
        """Wait for a condition on the table.

        Args:
            ready: the condition.
            awaited: the workers on which it depends.

        Raises:
            WorkerLost: a worker was lost.
            WorkerSilent: nothing changed for the timeout.
        """
        self._look(-1)
        begin = time.monotonic()
        while not ready(self._known):
            ranks = awaited(self._known)
            self._world.waits_for(ranks)
            self._check_alive(ranks)
            self._world.check_silence(ranks, time.monotonic() - begin)
            if self._look(self._changes):
                begin = time.monotonic()
        self._world.waits_for(())

    @contextmanager
    def change(self) -> Iterator[ClaimTable]:
        """Change the table; if the body raises, nothing is changed.

        Raises:
            WorkerLost: a worker was lost, and others have gone on with the table as it was.
        """
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
        """This worker synchronizes."""
        self._peers.client(0).ask("table.arrive")

    def missing(self) -> list[int]:
        """The workers that have yet to synchronize, as far as it was known when the table was read."""
        return [rank for rank in range(self._world.size) if rank not in self._arrived]

    def close(self) -> ClaimTable:
        """The last table: nobody changes it any more. For workers that re-form because one was lost.

        Raises:
            WorkerLost: nobody has it any more.
        """
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
        """The table after :meth:`close`."""
        return self._known

    def _check_alive(self, ranks: list[int]) -> None:
        gone = [rank for rank in ranks if rank in self._gone]
        if gone:
            self._world.check()
            named = name_ranks(gone)
            lost = WorkerLost(f"Rank {self._world.rank} lost {named}. See the output of {named} for the cause.")
            raise self._world.explain(lost)

    def _look(self, since: int) -> bool:
        (changes, text, self._arrived, self._gone), _ = self._peers.client(0).ask("table.look", since)
        if text:
            self._known, self.log = decode(text)
        changed: bool = changes != since
        self._changes = changes
        return changed
