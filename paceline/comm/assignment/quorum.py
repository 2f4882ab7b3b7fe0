"""Agreement on which workers contribute to a step that does not wait for all of them, before sums are exchanged.

::

    worker 0   compute ─ finish: counts ─┐
    worker 1   compute ──────────────────│── abandon ─┐          2 of 3 are needed
    worker 2   compute ── finish: counts ┴────────────┴─ exchange: the sums of 0 and 2

Each worker computes a group of microbatches and reports when it is done. The first results count until there are
enough. All workers then know the same set and start the exchange. If several workers compute the same group, the first
result counts.

On one machine the set is a table in shared memory (:class:`SharedMemoryQuorum`), on several machines a string in the
store of ``torch.distributed`` (:class:`StoreQuorum`).
"""

from __future__ import annotations

import time
from typing import Protocol

from paceline.comm.assignment.store import Store
from paceline.comm.collectives.step_header import check_steps
from paceline.comm.shm.arena import SharedMemory
from paceline.comm.world import World
from paceline.errors import WorkerSilent, name_ranks

_POLL_SECONDS, _CHECK_SECONDS = 1e-3, 0.1


class Quorum(Protocol):
    """Interface by which the workers of a step agree on the results that count."""

    def begin(self, step: int, groups: int, needed: int) -> None:
        """Start a step of ``groups`` groups, in which results of ``needed`` different groups are needed.

        Raises:
            DisagreementError: another worker is at another step.
        """

    def start(self, group: int) -> None:
        """Report that this worker starts to compute a group."""

    def finish(self, group: int) -> bool:
        """Report that this worker has computed a group and return whether its result counts."""

    def is_late(self, group: int) -> bool:
        """Return whether a result for a group would no longer count."""

    def wait(self, until: float | None = None) -> bool:
        """Wait for enough results, at most until a ``time.monotonic`` time, and return whether there are enough."""

    def open_group(self) -> int | None:
        """Return a group whose result is needed, preferably computed by few workers, or None if there are enough."""

    def agreed(self) -> dict[int, int]:
        """Return the rank whose result counts for each group. Final once there are enough results."""


def quorum_for(world: World) -> Quorum:
    """Return the fastest quorum that these workers can use."""
    if world.shared_memory is not None:
        return SharedMemoryQuorum(world, world.shared_memory)
    return StoreQuorum(world) if world.size > 1 else SingleQuorum()


class SingleQuorum:
    """Quorum of a single worker."""

    def begin(self, step: int, groups: int, needed: int) -> None:
        self._needed = needed
        self._done: set[int] = set()

    def start(self, group: int) -> None:
        pass

    def finish(self, group: int) -> bool:
        self._done.add(group)
        return True

    def is_late(self, group: int) -> bool:
        return False

    def wait(self, until: float | None = None) -> bool:
        return len(self._done) >= self._needed

    def open_group(self) -> int | None:
        return next((group for group in range(self._needed) if group not in self._done), None)

    def agreed(self) -> dict[int, int]:
        return dict.fromkeys(sorted(self._done), 0)


class SharedMemoryQuorum:
    """Quorum in shared memory. It takes 10 us for each worker and step."""

    def __init__(self, world: World, shared_memory: SharedMemory) -> None:
        size = world.size
        self._world = world
        self._shared_memory = shared_memory
        table = memoryview(shared_memory.share(8 * (2 + 3 * size))[0]).cast("q")
        self._step = table[:1]
        self._count = table[1:2]
        self._owners = table[2 : 2 + size]  # 1 + the rank whose result counts for a group
        self._at = table[2 + size : 2 + 2 * size]  # 1 + the group that a worker computes
        self._begun = table[2 + 2 * size : 2 + 3 * size]  # the last step that a worker has begun
        self._last = -1
        self._lock = shared_memory.lock()
        self._fresh = True

    def begin(self, step: int, groups: int, needed: int) -> None:
        if self._fresh:  # the table is uninitialized
            self._begun[self._world.rank] = -1
            if self._world.rank == 0:
                self._step[0] = -1
            self._shared_memory.all_gather(b"")
            self._fresh = False
        self._groups, self._needed = groups, needed
        with self._lock:
            self._begun[self._world.rank] = step
            check_steps(self._begun, (self._last, step))
            self._last = step
            if self._step[0] != step:  # the first worker to begin the step
                self._step[0], self._count[0] = step, 0
                for place in range(self._world.size):
                    self._owners[place] = self._at[place] = 0

    def start(self, group: int) -> None:
        self._at[self._world.rank] = group + 1

    def finish(self, group: int) -> bool:
        with self._lock:
            self._at[self._world.rank] = 0
            counts = not self.is_late(group)
            if counts:
                self._owners[group] = self._world.rank + 1
                self._count[0] += 1
        return counts

    def is_late(self, group: int) -> bool:
        return self._enough() or self._owners[group] != 0

    def wait(self, until: float | None = None) -> bool:
        self._shared_memory.wait_until(
            lambda: self._enough() or (until is not None and time.monotonic() > until), self._awaited
        )
        return self._enough()

    def open_group(self) -> int | None:
        with self._lock:
            if self._enough():
                return None
            busy = list(self._at)
            return min(
                (group for group in range(self._groups) if not self._owners[group]),
                key=lambda group: busy.count(group + 1),
                default=None,
            )

    def agreed(self) -> dict[int, int]:
        return {group: self._owners[group] - 1 for group in range(self._groups) if self._owners[group]}

    def _enough(self) -> bool:
        return self._count[0] >= self._needed

    def _awaited(self) -> list[int]:
        """Return the other ranks without a counted result. Some of them are needed."""
        owners = list(self._owners)
        return [rank for rank in range(self._world.size) if rank != self._world.rank and rank + 1 not in owners]


class StoreQuorum:
    """Quorum in the store: a string for each step, to which a worker appends its group and rank when it is done.

    The order in the string decides which results count. Each access is a round trip.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._store = Store(world, "quorum", "while they agreed on the contributions to a step")
        self._last = -1

    def begin(self, step: int, groups: int, needed: int) -> None:
        if not self._store.is_open:
            self._store.open()
            self._tell(-1)
            self._world.gather(None, "step")
        self._tell(step)
        self._before = self._last
        self._check_steps(step)
        if self._world.rank == 0 and self._last >= 0:  # no worker reads the previous step's string again
            self._store.ask(lambda store: store.delete_key(self._key))
        self._last = step
        self._groups, self._needed = groups, needed
        self._owners: dict[int, int] = {}
        self._append("")

    def _tell(self, step: int) -> None:
        self._store.ask(lambda store: store.set(self._store.key("begun", self._world.rank), str(step)))

    def _check_steps(self, step: int) -> None:
        keys = [self._store.key("begun", rank) for rank in range(self._world.size)]
        begun = self._store.ask(lambda store: store.multi_get(keys))
        check_steps([*map(int, begun)], (self._before, step))

    def start(self, group: int) -> None:
        pass

    def finish(self, group: int) -> bool:
        self._append(f"{group}:{self._world.rank}")
        self._check()
        return self._owners.get(group) == self._world.rank

    def is_late(self, group: int) -> bool:
        return self._enough() or group in self._owners

    def wait(self, until: float | None = None) -> bool:
        begin = looked = time.monotonic()
        self._world.waits_for(self._world.others)
        while not self._enough() and (until is None or time.monotonic() < until):
            if time.monotonic() - begin > self._world.timeout:
                silent = [rank for rank in range(self._world.size) if rank not in self._owners.values()]
                raise WorkerSilent(
                    f"Rank {self._world.rank} waited {self._world.timeout:.0f} s for {self._needed} groups of step "
                    f"{self._last}, and got {len(self._owners)}; none came from {name_ranks(silent)} "
                    f"(timeout_seconds). See their logs: they are stopped, or busy with something else."
                )
            if time.monotonic() - looked > _CHECK_SECONDS:  # another worker may be at another step, and have ended
                looked = time.monotonic()
                self._check_steps(self._last)
            time.sleep(_POLL_SECONDS)
        self._world.waits_for(())
        return self._enough()

    def open_group(self) -> int | None:
        """Return the first open group, starting at a different group on each worker to spread the copies."""
        if self._enough():
            return None
        groups = ((self._world.rank + place) % self._groups for place in range(self._groups))
        return next((group for group in groups if group not in self._owners), None)

    def agreed(self) -> dict[int, int]:
        return dict(sorted(self._owners.items()))

    def _enough(self) -> bool:
        if len(self._owners) < self._needed:
            self._check()
        return len(self._owners) >= self._needed

    def _check(self) -> None:
        text = self._store.ask(lambda store: store.get(self._key)).decode()
        owners: dict[int, int] = {}
        for one in text.split():
            group, rank = map(int, one.split(":"))
            if len(owners) < self._needed:
                owners.setdefault(group, rank)
        self._owners = owners

    def _append(self, text: str) -> None:
        self._store.ask(lambda store: store.append(self._key, text + " "))  # type: ignore[attr-defined]

    @property
    def _key(self) -> str:
        return self._store.key(self._last)
