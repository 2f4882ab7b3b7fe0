"""Dynamic assignment of a step's microbatches: a worker leases each microbatch before it computes it.

::

    share of worker 0    ▓▓▓▓░░░░|         ▓ leased by its owner, from the head
    share of worker 1    ▓▓▓▓▓▓▓▓|         ░ free
    share of worker 2    ▓░░░░░▒▒|         ▒ leased by another worker, from the tail

A worker leases from the head of its own share. When its share is used up, it leases from the tail of the share that
would be finished last. Taking from the tail keeps the owner's sums contiguous. Near the end of a step a worker takes
no microbatch if the others would finish all free microbatches first, so that a slow worker does not hold up the step.
When no microbatch is free, an overdue microbatch is computed a second time. The first result counts.

With located data, a worker can compute only some microbatches. A share then consists of pools, each with microbatches
that the same workers can compute (``schedule.placement``); with other data, a share is one pool. An owner begins with
the pools of which it is the only holder.

On one machine the leases are a table in shared memory (:class:`Leases`), with clocks that all workers read. On several
machines they are two counters for each pool in the store of ``torch.distributed`` (:class:`StoreLeases`): the number
of leased microbatches, and the number of those leased from the tail.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import sub
from typing import NamedTuple, Protocol

import torch.distributed as dist

from paceline.comm.assignment.store import Store
from paceline.comm.shm.arena import SharedMemory
from paceline.comm.world import World
from paceline.schedule.placement import Pool

_PAUSE = 0.05  # sleep of a waiting worker, as a fraction of its seconds per microbatch
_LONGEST_PAUSE_SECONDS = 1e-3
_OVERDUE = 1.5  # a microbatch is overdue after this multiple of its owner's seconds per microbatch
_POLL_SECONDS = 0.02  # interval at which a waiting worker checks whether the others are alive
_LATE = 0.9
"""A worker takes no microbatch if the others finish all free ones in this fraction of its seconds per microbatch."""


class Lease(NamedTuple):
    """A microbatch to compute, the rank whose share contains it, and whether another worker already computes it."""

    microbatch: int
    share: int
    again: bool = False


class Leasing(Protocol):
    """Interface by which a worker leases microbatches in a step."""

    asked: float  # time (``time.monotonic``) at which the latest lease was requested, after any wait for a microbatch

    def begin(self, step: int, pools: Sequence[Pool], seconds: Sequence[float]) -> None:
        """Start a step. ``seconds`` holds each worker's measured seconds per microbatch, or 0 if unknown."""

    def next(self) -> Lease | None:
        """Wait for the next lease and return it, or None if this worker has nothing more to do in this step."""

    def overtaken(self, microbatch: int) -> bool:
        """Return whether a result for a leased microbatch already counts."""

    def finish(self, microbatch: int) -> bool:
        """Report a leased microbatch as computed and return whether this result is the first, which counts."""


def leases_for(world: World, microbatches: int) -> Leasing:
    """Return leases through shared memory if all workers share it, otherwise through the store."""
    if world.shared_memory is not None:
        return Leases(world, world.shared_memory, microbatches)
    return StoreLeases(world)


def _places(pools: Sequence[Pool], rank: int) -> tuple[list[int], list[int]]:
    """Return the indices of a worker's own pools, and of those of others that it can compute."""
    able = [place for place, pool in enumerate(pools) if rank in pool.holders]
    return [one for one in able if pools[one].owner == rank], [one for one in able if pools[one].owner != rank]


class Leases:
    """Leases through shared memory. A lease takes 20 us."""

    def __init__(self, world: World, shared_memory: SharedMemory, microbatches: int) -> None:
        self._world = world
        self._size = world.size
        self._rank = world.rank
        numbers = 1 + self._size + 3 * microbatches
        table = memoryview(shared_memory.share(8 * (numbers + 1 + 2 * self._size))[0])
        whole = table[: 8 * numbers].cast("q")
        self._step = whole[:1]
        self._held = whole[1 : 1 + self._size]  # 1 + leased microbatch; 0: none; -1: step not begun
        self._done, self._head, self._tail = (  # 1 + the rank whose result counts; free microbatches of each pool
            whole[1 + self._size + at * microbatches :][:microbatches] for at in range(3)
        )
        clocks = table[8 * numbers : 8 * (numbers + 1 + 2 * self._size)].cast("d")
        self._opened = clocks[:1]
        self._since = clocks[1 : 1 + self._size]
        self._pace = clocks[1 + self._size :]
        self._lock = shared_memory.lock()
        self._pools: Sequence[Pool] = ()
        self._own: list[int] = []  # pools of this worker, and those of others from which it may take
        self._others: list[int] = []
        self._mine: list[float] = []
        self.asked = 0.0
        self._shared_memory = shared_memory
        self._fresh = True

    def begin(self, step: int, pools: Sequence[Pool], seconds: Sequence[float]) -> None:
        if self._fresh:  # the table is uninitialized
            if self._rank == 0:
                self._step[0] = -1
            self._shared_memory.all_gather(b"")
            self._fresh = False
        self._pools, self._mine = pools, []
        self._own, self._others = _places(pools, self._rank)
        now = time.monotonic()
        with self._lock:
            if self._step[0] != step:  # the first worker to begin the step
                self._step[0] = step
                for rank in range(self._size):
                    self._held[rank], self._pace[rank], self._since[rank] = -1, seconds[rank], now
                for place, pool in enumerate(pools):
                    self._head[place], self._tail[place] = 0, len(pool.microbatches)
                    for microbatch in pool.microbatches:
                        self._done[microbatch] = 0
                self._opened[0] = now
            self._held[self._rank], self._since[self._rank] = 0, now

    def next(self) -> Lease | None:
        begin = checked = time.monotonic()
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
            if (now := time.monotonic()) - checked > _POLL_SECONDS:
                checked = now
                self._check_alive(now - begin)

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
        """Return the next lease, or None and whether a lease may become available later."""
        count = len(self._pools)
        free = [*map(sub, self._tail[:count], self._head[:count])]
        if not any(free[place] for place in chain(self._own, self._others)):
            return self._again(now)
        pace, left = self._paces(), sum(free)
        ends = [self._free_at(rank, now, pace[rank]) for rank in range(self._size)]
        for place in self._candidates(free, ends, pace):
            pool = self._pools[place]
            if self._others_are_faster(pool.holders, left, now + _LATE * pace[self._rank], ends, pace):
                continue
            if pool.owner == self._rank:
                self._head[place] += 1
                return Lease(pool.microbatches[self._head[place] - 1], self._rank), True
            self._tail[place] -= 1
            return Lease(pool.microbatches[self._tail[place]], pool.owner), True
        return None, True

    def _candidates(self, free: list[int], ends: list[float], pace: list[float]) -> Iterator[int]:
        """Yield the pools from which this worker may take: its own, then those of the worker that finishes last."""
        yield from (place for place in self._own if free[place])
        until = [*ends]
        for pool, count in zip(self._pools, free, strict=True):
            until[pool.owner] += count * pace[pool.owner]
        others = (place for place in self._others if free[place])
        yield from sorted(others, key=lambda place: -until[self._pools[place].owner])

    def _others_are_faster(
        self, ranks: Sequence[int], left: int, end: float, ends: list[float], pace: list[float]
    ) -> bool:
        """Return whether other workers of ``ranks`` would finish all ``left`` free microbatches before ``end``."""
        if left > 8 * self._size:
            return False
        could = 0
        for rank in ranks:
            if rank != self._rank and end > ends[rank]:
                could += int((end - ends[rank]) / pace[rank])
                if could >= left:
                    return True
        return False

    def _paces(self) -> list[float]:
        """Return each worker's seconds per microbatch. An unknown value is the mean of the known ones."""
        known = [seconds for seconds in self._pace if seconds > 0]
        usual = sum(known) / len(known) if known else 1.0
        return [seconds if seconds > 0 else usual for seconds in self._pace]

    def _free_at(self, rank: int, now: float, pace: float) -> float:
        """Return the time at which a worker will be free. A late worker is expected to take its elapsed time again."""
        if self._held[rank] == 0:
            return now
        elapsed = now - self._since[rank]
        if self._held[rank] < 0:  # has not begun the step
            return now + elapsed
        return self._since[rank] + pace if elapsed < pace else now + elapsed

    def _again(self, now: float) -> tuple[Lease | None, bool]:
        """Return a lease of an overdue microbatch, or None and whether a microbatch may become overdue."""
        pace = self._paces()
        waits = False
        for rank in range(self._size):
            microbatch = self._held[rank] - 1
            if rank == self._rank or microbatch < 0 or self._done[microbatch]:
                continue
            if any(self._held[other] == microbatch + 1 for other in range(self._size) if other != rank):
                continue
            pool = next(one for one in self._pools if microbatch in one.microbatches)
            if self._rank not in pool.holders:
                continue
            if now - self._since[rank] < _OVERDUE * pace[rank]:
                waits = True
            else:
                return Lease(microbatch, pool.owner, again=True), True
        return None, waits

    def _check_alive(self, waited: float) -> None:
        """Check, while this worker waits, that the workers with a lease are alive."""
        self._world.check()
        self._shared_memory.check_alive(
            [rank for rank in range(self._size) if rank != self._rank and self._held[rank]], waited
        )


class StoreLeases:
    """Leases through the store. A lease takes one round trip; from another share, two plus one per open pool."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._store = Store(world, "leases", "while they took microbatches")
        self._step = -1
        self._pools: Sequence[Pool] = ()
        self._pace: Sequence[float] = ()
        self._own: list[int] = []  # pools of this worker that may have free microbatches
        self._leased = 0  # microbatches of the first of them that this worker has leased
        self._open: list[int] = []
        self.asked = 0.0

    def begin(self, step: int, pools: Sequence[Pool], seconds: Sequence[float]) -> None:
        if not self._store.is_open:
            self._store.open()
        if self._world.rank == 0 and self._step >= 0:  # no worker reads the previous step's keys again
            self._store.ask(self._forget)
        self._step, self._pools, self._pace, self._leased = step, pools, seconds, 0
        self._own, self._open = _places(pools, self._world.rank)

    def next(self) -> Lease | None:
        self.asked = time.monotonic()
        while self._own:
            own = self._pools[self._own[0]].microbatches
            if self._leased < len(own) and self._add("taken", self._own[0], 1) <= len(own):
                self._leased += 1
                return Lease(own[self._leased - 1], self._world.rank)
            del self._own[0]
            self._leased = 0
        while self._open:
            left = {place: len(self._pools[place].microbatches) - self._add("taken", place, 0) for place in self._open}
            self._open = [place for place in self._open if left[place] > 0]
            if not self._open:
                return None
            victim = max(self._open, key=lambda place: left[place] * (self._pace[self._pools[place].owner] or 1.0))
            pool = self._pools[victim]
            if self._add("taken", victim, 1) <= len(pool.microbatches):
                return Lease(pool.microbatches[-self._add("tail", victim, 1)], pool.owner)
        return None

    def overtaken(self, microbatch: int) -> bool:
        return False

    def finish(self, microbatch: int) -> bool:
        return True

    def _forget(self, store: dist.distributed_c10d.Store) -> None:
        for place in range(len(self._pools)):
            store.delete_key(self._key("taken", place))
            store.delete_key(self._key("tail", place))

    def _add(self, what: str, place: int, number: int) -> int:
        count: int = self._store.ask(lambda store: store.add(self._key(what, place), number))
        return count

    def _key(self, what: str, place: int) -> str:
        return self._store.key(self._step, place, what)
