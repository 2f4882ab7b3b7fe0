"""Claims of the parts of a batch, by workers that go from batch to batch at their own pace.

::

    time        0     1     2     3     4     5     6        2 parts in each batch: 0.0 is the first part of batch 0
    worker 0    ▓0.0  ▓1.0  ▓1.1  ▓2.1  ▓3.0  ▓3.1  ...      each part is computed once
    worker 1    ▓0.1        ▓2.0        ▓4.0        ...      this worker takes twice as long

A worker claims parts of its batch until none is left, and goes on to the next batch. It waits for no part that another
worker computes.

On one machine the claims are two numbers in shared memory (:class:`SharedMemoryClaims`). On several machines they are a
counter for each batch in the store of ``torch.distributed`` (:class:`StoreClaims`).
"""

from __future__ import annotations

from typing import Protocol

from paceline.comm.assignment.store import Store
from paceline.comm.shm.arena import SharedMemory
from paceline.comm.world import World


class PartClaims(Protocol):
    """Interface by which a worker claims parts."""

    def claim(self, step: int, parts: int) -> int | None:
        """Claim a part of the batch of a step, which has ``parts`` parts.

        All workers meet in their first claim. A worker claims no part of an earlier step than before.

        Returns:
            Number of the part. None if all parts are claimed.
        """

    def forget(self) -> None:
        """Forget the claims up to now. All workers call this when none of them claims these parts any more."""


def claims_for(world: World) -> PartClaims:
    """Return claims through shared memory if all workers share it, otherwise through the store."""
    return StoreClaims(world) if world.shared_memory is None else SharedMemoryClaims(world, world.shared_memory)


class SharedMemoryClaims:
    """Claims through shared memory."""

    def __init__(self, world: World, shared_memory: SharedMemory) -> None:
        self._rank, self._shared_memory = world.rank, shared_memory
        table = memoryview(shared_memory.share(16)[0]).cast("q")
        self._step, self._claimed = table[:1], table[1:2]  # newest step of a claim, and the number of its claimed parts
        self._lock = shared_memory.lock()
        self._fresh = True

    def claim(self, step: int, parts: int) -> int | None:
        if self._fresh:  # the table is uninitialized
            if self._rank == 0:
                self._step[0] = -1
            self._shared_memory.all_gather(b"")
            self._fresh = False
        with self._lock:
            if self._step[0] < step:
                self._step[0], self._claimed[0] = step, 0
            part = self._claimed[0]
            if self._step[0] > step or part == parts:  # others go on to a later step when no part is left
                return None
            self._claimed[0] = part + 1
        return part

    def forget(self) -> None:
        pass


class StoreClaims:
    """Claims through the store. Each takes a round trip, also the last one of a step, which finds no part."""

    def __init__(self, world: World) -> None:
        self._store = Store(world, "parts", "while they claimed parts of a batch")
        self._made = list[str]()  # keys that this worker has added

    def claim(self, step: int, parts: int) -> int | None:
        if not self._store.is_open:
            self._store.open()
        key = self._store.key(step)
        claimed: int = self._store.ask(lambda store: store.add(key, 1))
        if claimed == 1:
            self._made.append(key)
        return claimed - 1 if claimed <= parts else None

    def forget(self) -> None:
        if self._made:
            self._store.ask(lambda store: [store.delete_key(key) for key in self._made])
        self._made.clear()
