"""Claims of the parts of a batch, by workers that go from batch to batch at their own pace.

::

    time        0     1     2     3     4     5     6        2 parts in each batch: 0.0 is the first part of batch 0
    worker 0    ▓0.0  ▓1.0  ▓1.1  ▓2.1  ▓3.0  ▓3.1  ...      each part is computed once
    worker 1    ▓0.1        ▓2.0        ▓4.0        ...      this worker takes twice as long

A worker claims parts of its batch until none is left, and moves on to the next batch. It waits for no part that another
worker computes.

The same table decides which workers take part in an exchange that does not wait for all of them::

    worker 0   ▓ ▓ ▓ arrive ───────────────┐
    worker 1   ▓ ▓ arrive ── quorum ─ grace ┴─ exchange      the ranks 0 and 1, once and for all
    worker 2   ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ arrive: late

On one machine the table is in shared memory (:class:`SharedMemoryClaims`). On several machines it is a counter for each
batch, and a string for each exchange, in the store of ``torch.distributed`` (:class:`StoreClaims`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.comm.assignment.store import Store
from paceline.comm.shm.arena import SharedMemory
from paceline.comm.shm.backoff import backoff_seconds
from paceline.comm.world import World

Enough = Callable[[Sequence[int]], bool]
"""Function that returns whether these ranks are a quorum."""
_DECIDED = "."


class PartClaims(Protocol):
    """Interface by which a worker claims parts."""

    def meet(self) -> None:
        """Make the table. All workers call this together, before anything else."""

    def claim(self, step: int, parts: int) -> int | None:
        """Claim one of the ``parts`` parts of a step's batch, never of an earlier step than before.

        Returns:
            Number of the part. None if all parts are claimed.
        """

    def arrive(self, step: int, enough: Enough, grace: float) -> list[int]:
        """Report that this worker has reached the exchange after ``step``, and wait until its participants are decided.

        The decision is final. They are all workers or, ``grace`` seconds after a quorum has formed, those that have
        arrived. Only a worker that took part in the previous exchange decides on a quorum: late workers never continue
        alone, and the size of a quorum may follow from the previous exchange.

        Returns:
            Their ranks, in ascending order. Empty if this worker is late.
        """

    def forget(self) -> None:
        """Forget the claims up to now. All workers call this when none of them still claims these parts."""


def claims_for(world: World) -> PartClaims:
    """Return claims through shared memory if all workers share it, otherwise through the store."""
    return StoreClaims(world) if world.shared_memory is None else SharedMemoryClaims(world, world.shared_memory)


class SharedMemoryClaims:
    """Claims through shared memory."""

    def __init__(self, world: World, shared_memory: SharedMemory) -> None:
        self._rank, self._size, self._shared_memory = world.rank, world.size, shared_memory
        table = memoryview(shared_memory.share(8 * (3 + 2 * world.size))[0]).cast("q")
        self._step, self._claimed = table[:1], table[1:2]  # newest step of a claim, and the number of its claimed parts
        self._decided = table[2:3]  # newest step after which the workers of an exchange are decided
        self._arrived = table[3 : 3 + world.size]  # newest step at whose exchange each worker has arrived
        self._takes = table[3 + world.size : 3 + 2 * world.size]  # whether it takes part in the newest exchange
        self._lock = shared_memory.lock()
        self._took_part = True  # in the previous exchange

    def meet(self) -> None:
        if self._rank == 0:
            self._step[0] = self._decided[0] = -1
            for rank in range(self._size):
                self._arrived[rank] = -1
        self._shared_memory.all_gather(b"")

    def claim(self, step: int, parts: int) -> int | None:
        with self._lock:
            if self._step[0] < step:
                self._step[0], self._claimed[0] = step, 0
            part = self._claimed[0]
            if self._step[0] > step or part == parts:  # others move on to a later step when no part is left
                return None
            self._claimed[0] = part + 1
        return part

    def arrive(self, step: int, enough: Enough, grace: float) -> list[int]:
        with self._lock:
            if self._decided[0] >= step:
                self._took_part = False
                return []
            self._arrived[self._rank] = step
        quorum: list[float] = []  # time at which this worker has first seen one

        def decide() -> bool:
            with self._lock:
                if self._decided[0] >= step:
                    return True
                here = self._here(step)
                if not is_over(len(here) == self._size, self._took_part and enough(here), grace, quorum):
                    return False
                self._decided[0] = step
                for rank in range(self._size):
                    self._takes[rank] = rank in here
            return True

        self._shared_memory.wait_until(decide, lambda: sorted({*range(self._size)}.difference(self._here(step))))
        self._took_part = True  # it arrived before the decision
        return [rank for rank in range(self._size) if self._takes[rank]]

    def _here(self, step: int) -> list[int]:
        return [rank for rank in range(self._size) if self._arrived[rank] == step]

    def forget(self) -> None:
        pass


class StoreClaims:
    """Claims through the store. Each takes a round trip, also the last one of a step, which finds no part."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._store = Store(world, "parts", "while they claimed parts of a batch")
        self._made = list[str]()  # keys that this worker deletes
        self._took_part = True  # in the previous exchange

    def meet(self) -> None:
        self._store.open()

    def claim(self, step: int, parts: int) -> int | None:
        key = self._store.key(step)
        claimed: int = self._store.ask(lambda store: store.add(key, 1))
        if claimed == 1:
            self._made.append(key)
        return claimed - 1 if claimed <= parts else None

    def arrive(self, step: int, enough: Enough, grace: float) -> list[int]:
        key, begin, quorum = self._store.key("exchange", step), time.monotonic(), list[float]()
        self._append(key, f"{self._world.rank} ")
        while True:  # the ranks before the first mark take part
            arrived, decided, _ = self._store.ask(lambda store: store.get(key)).decode().partition(_DECIDED)
            here = sorted(map(int, arrived.split()))
            complete = len(here) == self._world.size
            if decided or complete:
                break
            if is_over(complete, self._took_part and enough(here), grace, quorum):
                self._append(key, _DECIDED)
                continue
            awaited, waited = [rank for rank in self._world.others if rank not in here], time.monotonic() - begin
            self._world.waits_for(awaited)
            self._world.check_silence(awaited, waited)
            time.sleep(backoff_seconds(waited))
        self._world.waits_for(())
        if here[0] == self._world.rank:
            self._made.append(key)
        self._took_part = self._world.rank in here
        return here if self._took_part else []

    def _append(self, key: str, text: str) -> None:
        self._store.ask(lambda store: store.append(key, text))  # type: ignore[attr-defined]

    def forget(self) -> None:
        if self._made:
            self._store.ask(lambda store: [store.delete_key(key) for key in self._made])
        self._made.clear()


def is_over(complete: bool, enough: bool, grace: float, quorum: list[float]) -> bool:
    """Return whether a wait for the others is over.

    Args:
        complete: whether all workers have arrived.
        enough: whether those that have arrived are a quorum.
        grace: seconds to wait for others then.
        quorum: empty until there is a quorum, then the time at which this was first seen.
    """
    if complete or not enough:
        return complete
    now = time.monotonic()
    if not quorum:
        quorum.append(now)
    return now - quorum[0] >= grace
