"""Who computes which microbatch of a step, decided while it is computed: each microbatch has one owner, by lease.

::

    share of worker 0    ▓▓▓▓░░░░|         ▓ leased by its owner, from the head
    share of worker 1    ▓▓▓▓▓▓▓▓|         ░ free
    share of worker 2    ▓░░░░░▒▒|         ▒ leased by another worker, from the tail

A worker takes from the head of its own share; when that is used up it takes from the tail of the share that would be
finished last (the tail: so the owner's sums stay contiguous). Near the end of a step it leaves a microbatch to others
when all that is free would be done by them before it could do one itself: a slow worker must not begin what would hold
up all. A microbatch that is not back when it was to be expected, and everything else is done, is computed a second
time; the first result counts.

On one machine all this is a table in shared memory (:class:`Leases`), with clocks that all can read. On several
machines it is two counters for each share in the store of ``torch.distributed`` (:class:`StoreLeases`): how many of the
share are taken, and how many of these from the tail.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch.distributed as dist

from paceline.comm.assignment.store import Store
from paceline.comm.shm.arena import SharedMemory
from paceline.comm.world import World

_PAUSE = 0.05
"""Of the seconds for a microbatch: how long a worker sleeps that has nothing to do yet."""
_LONGEST_PAUSE_SECONDS = 1e-3
_OVERDUE = 1.5
"""A microbatch is overdue after so many times the seconds that its owner needs for one."""
_LOOK_SECONDS = 0.02
"""How often a worker that has nothing to do yet looks whether the others still live."""
_LATE = 0.9
"""A worker leaves a microbatch to the others if they are done in this part of the seconds it would need."""


class Lease(NamedTuple):
    """A microbatch to compute, the rank whose share it is of, and whether another worker is at it, too."""

    microbatch: int
    share: int
    again: bool = False


class Leasing(Protocol):
    """How a worker gets leases in a step.

    Attributes:
        asked: the time (``time.monotonic``) at which the search for the last lease began, without waiting for one.
    """

    asked: float

    def begin(self, step: int, shares: Sequence[range], seconds: Sequence[float]) -> None:
        """Start a step; ``seconds``: what each worker has needed for a microbatch so far, 0 if not known."""
        ...

    def next(self) -> Lease | None:
        """What to compute next; none if this worker has nothing more to do in this step."""
        ...

    def overtaken(self, microbatch: int) -> bool:
        """Whether another worker has given the result of a leased microbatch already."""
        ...

    def finish(self, microbatch: int) -> bool:
        """Give the result of a leased microbatch; whether it is the first one, which counts."""
        ...


def leases_for(world: World, microbatches: int) -> Leasing:
    """The fastest way in which these workers can lease microbatches to each other."""
    if world.shared_memory is not None:
        return Leases(world, world.shared_memory, microbatches)
    return StoreLeases(world)


class Leases:
    """Leases through shared memory: 20 us each."""

    def __init__(self, world: World, shared_memory: SharedMemory, microbatches: int) -> None:
        self._world = world
        self._size = world.size
        self._rank = world.rank
        columns = 3 * self._size
        table = memoryview(shared_memory.share(8 * (1 + columns + microbatches + 1 + 2 * self._size))[0])
        whole = table[: 8 * (1 + columns + microbatches)].cast("q")
        self._step = whole[:1]
        self._head = whole[1 : 1 + self._size]
        self._tail = whole[1 + self._size : 1 + 2 * self._size]
        self._held = whole[1 + 2 * self._size : 1 + columns]  # 1 + the microbatch that a worker is at; -1: not here yet
        self._done = whole[1 + columns :]  # 1 + the rank whose result counts
        clocks = table[8 * (1 + columns + microbatches) : 8 * (2 + columns + microbatches + 2 * self._size)].cast("d")
        self._opened = clocks[:1]
        self._since = clocks[1 : 1 + self._size]
        self._pace = clocks[1 + self._size :]
        self._lock = shared_memory.lock()
        self._shares: Sequence[range] = ()
        self._mine: list[float] = []
        self.asked = 0.0
        self._shared_memory = shared_memory
        self._fresh = True

    def begin(self, step: int, shares: Sequence[range], seconds: Sequence[float]) -> None:
        if self._fresh:  # what is in the table is not known
            if self._rank == 0:
                self._step[0] = -1
            self._shared_memory.all_gather(b"")
            self._fresh = False
        self._shares = shares
        self._mine = []
        now = time.monotonic()
        with self._lock:
            if self._step[0] != step:  # the first one here
                self._step[0] = step
                for rank, share in enumerate(shares):
                    self._head[rank], self._tail[rank] = share.start, share.stop
                    self._held[rank], self._pace[rank], self._since[rank] = -1, seconds[rank], now
                for microbatch in range(shares[-1].stop):
                    self._done[microbatch] = 0
                self._opened[0] = now
            self._held[self._rank], self._since[self._rank] = 0, now

    def next(self) -> Lease | None:
        begin = looked = time.monotonic()
        while True:
            with self._lock:
                self.asked = now = time.monotonic()
                lease, waits = self._choose(now)
                if lease is not None or not waits:
                    self._held[self._rank] = lease.microbatch + 1 if lease else 0
                    self._since[self._rank] = now
                    return lease
                self._held[self._rank] = 0
            time.sleep(min(_PAUSE * self._pace[self._rank], _LONGEST_PAUSE_SECONDS))
            if (now := time.monotonic()) - looked > _LOOK_SECONDS:
                looked = now
                self._look(now - begin)

    def overtaken(self, microbatch: int) -> bool:
        return self._done[microbatch] != 0

    def finish(self, microbatch: int) -> bool:
        now = time.monotonic()
        with self._lock:
            self._mine.append(now - self._since[self._rank])
            self._pace[self._rank] = sum(self._mine) / len(self._mine)
            self._held[self._rank], self._since[self._rank] = 0, now
            first = self._done[microbatch] == 0
            if first:
                self._done[microbatch] = self._rank + 1
        return first

    def _choose(self, now: float) -> tuple[Lease | None, bool]:
        """The next lease; without one, whether there may be one later."""
        free = [self._tail[rank] - self._head[rank] for rank in range(self._size)]
        left = sum(free)
        if not left:
            return self._again(now)
        pace = self._paces()
        ends = [self._free_at(rank, now, pace[rank]) for rank in range(self._size)]
        mine = pace[self._rank]
        if self._others_are_faster(left, now + _LATE * mine, ends, pace):
            return None, True
        if free[self._rank]:
            self._head[self._rank] += 1
            return Lease(self._head[self._rank] - 1, self._rank), True
        victim = max(
            (rank for rank in range(self._size) if free[rank]), key=lambda one: ends[one] + free[one] * pace[one]
        )
        self._tail[victim] -= 1
        return Lease(self._tail[victim], victim), True

    def _others_are_faster(self, left: int, end: float, ends: list[float], pace: list[float]) -> bool:
        """Whether the others would have done all that is free by then."""
        if left > 8 * self._size:
            return False
        could = 0
        for rank in range(self._size):
            if rank != self._rank and end > ends[rank]:
                could += int((end - ends[rank]) / pace[rank])
                if could >= left:
                    return True
        return False

    def _paces(self) -> list[float]:
        """Seconds for a microbatch of each worker; of one that is not known the mean of the others."""
        known = [seconds for seconds in self._pace if seconds > 0]
        usual = sum(known) / len(known) if known else 1.0
        return [seconds if seconds > 0 else usual for seconds in self._pace]

    def _free_at(self, rank: int, now: float, pace: float) -> float:
        """When a worker will have done what it is at; one that is late is expected to take as long again."""
        if self._held[rank] == 0:
            return now
        elapsed = now - self._since[rank]
        if self._held[rank] < 0:  # not here yet
            return now + elapsed
        return self._since[rank] + pace if elapsed < pace else now + elapsed

    def _again(self, now: float) -> tuple[Lease | None, bool]:
        """Nothing is free: whether a microbatch is overdue, or may be soon."""
        pace = self._paces()
        waits = False
        for rank in range(self._size):
            microbatch = self._held[rank] - 1
            if rank == self._rank or microbatch < 0 or self._done[microbatch]:
                continue
            if any(self._held[other] == microbatch + 1 for other in range(self._size) if other != rank):
                continue
            if now - self._since[rank] < _OVERDUE * pace[rank]:
                waits = True
            else:
                share = next(owner for owner, held in enumerate(self._shares) if microbatch in held)
                return Lease(microbatch, share, again=True), True
        return None, waits

    def _look(self, waited: float) -> None:
        """While this worker waits for what others will do faster: look whether they still can."""
        self._world.check()
        self._shared_memory.look(
            [rank for rank in range(self._size) if rank != self._rank and self._held[rank]], waited
        )


class StoreLeases:
    """Leases through the store: a round trip each; for one from another's share two, and one for each open share."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._store = Store(world, "leases", "while they took microbatches")
        self._step = -1
        self._shares: Sequence[range] = ()
        self._pace: Sequence[float] = ()
        self._own = 0
        self._open: list[int] = []
        self.asked = 0.0

    def begin(self, step: int, shares: Sequence[range], seconds: Sequence[float]) -> None:
        if not self._store.is_open:
            self._store.open()
        if self._world.rank == 0 and self._step >= 0:  # all have come to the next step, so none asks for these again
            self._store.ask(self._forget)
        self._step, self._shares, self._pace = step, shares, seconds
        self._own = 0
        self._open = [rank for rank, share in enumerate(shares) if share and rank != self._world.rank]

    def next(self) -> Lease | None:
        self.asked = time.monotonic()
        own = self._shares[self._world.rank]
        if self._own < len(own):
            if self._add("taken", self._world.rank, 1) <= len(own):
                self._own += 1
                return Lease(own.start + self._own - 1, self._world.rank)
            self._own = len(own)
        while self._open:
            left = {rank: len(self._shares[rank]) - self._add("taken", rank, 0) for rank in self._open}
            self._open = [rank for rank in self._open if left[rank] > 0]
            if not self._open:
                return None
            victim = max(self._open, key=lambda rank: left[rank] * (self._pace[rank] or 1.0))
            if self._add("taken", victim, 1) <= len(self._shares[victim]):
                return Lease(self._shares[victim].stop - self._add("tail", victim, 1), victim)
        return None

    def overtaken(self, microbatch: int) -> bool:
        return False

    def finish(self, microbatch: int) -> bool:
        return True

    def _forget(self, store: dist.distributed_c10d.Store) -> None:
        for rank in range(self._world.size):
            store.delete_key(self._key("taken", rank))
            store.delete_key(self._key("tail", rank))

    def _add(self, what: str, rank: int, number: int) -> int:
        count: int = self._store.ask(lambda store: store.add(self._key(what, rank), number))
        return count

    def _key(self, what: str, rank: int) -> str:
        return self._store.key(self._step, rank, what)
