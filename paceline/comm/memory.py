"""Memory that all workers of one machine see, and the announcements that go with it.

What a worker writes is seen by the others at once; that it is complete is announced in a flag, a number that only
grows. No byte goes through a socket, and the end of a worker is seen through its process handle.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import time
import weakref
from typing import TYPE_CHECKING

from paceline.errors import WorkerLost

if TYPE_CHECKING:
    from paceline.comm.world import World

_SLOTS = 1 << 15
_SPINS = 200
"""Looks before the first sleep: about 0.1 ms, what a short wait takes."""
_NAP_SECONDS = 5e-5
_TOKEN_BYTES = 16
_LOOK_SECONDS = 0.02
"""How often a waiting worker looks whether the others still live."""


def shared_memory(world: World) -> Memory | None:
    """The memory of workers that are all on one machine, else none; all workers call this together."""
    ordered = platform.machine() in ("x86_64", "AMD64")  # stores become visible in the order they are made
    able = ordered and hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
    one_machine = world.size == world.local_size and world.device.type == "cpu"
    if world.size == 1 or not all(world.gather(able and one_machine, "start")):
        return None
    blocks = _share(world, _SLOTS * 8)
    pids = world.gather(os.getpid() if blocks else None, "start")
    return Memory(world, blocks, pids) if blocks and None not in pids else None


class Memory:
    """Blocks of memory, one of each worker, and flags to announce what is in them."""

    def __init__(self, world: World, flags: list[mmap.mmap], pids: list[int]) -> None:
        self._world = world
        self._flags = [memoryview(block).cast("q") for block in flags]
        self._handles = {rank: os.pidfd_open(pid) for rank, pid in enumerate(pids) if rank != world.rank}
        weakref.finalize(self, _close, list(self._handles.values()))
        self._pids = pids
        self._reserved = 0

    def share(self, size: int) -> list[mmap.mmap]:
        """A new block of each worker, in the order of ranks; all workers call this together."""
        blocks = _share(self._world, max(size, mmap.PAGESIZE))
        assert blocks is not None, "workers that shared memory at the start cannot any more"
        return blocks

    def reserve(self, slots: int) -> int:
        """The first of so many flags for a use of their own; all workers reserve in the same order."""
        first, self._reserved = self._reserved, self._reserved + slots
        assert self._reserved <= _SLOTS, f"more than {_SLOTS} flags"
        return first

    def announce(self, slot: int, value: int) -> None:
        """Tell the others that this worker got so far."""
        self._flags[self._world.rank][slot] = value

    def wait(self, slot: int, value: int) -> None:
        """Wait until all workers have announced at least this value.

        Raises:
            WorkerLost: a worker ended, or stayed silent for the timeout.
        """
        waiting = [rank for rank, flags in enumerate(self._flags) if flags[slot] < value]
        looks = 0
        begin = looked = 0.0
        while waiting:
            looks += 1
            if looks < _SPINS:
                os.sched_yield()
            else:
                time.sleep(_NAP_SECONDS)
                now = time.monotonic()
                begin, looked = begin or now, looked or now
                if now - looked > _LOOK_SECONDS:
                    looked = now
                    self._look_after(waiting, slot, value, now - begin)
            waiting = [rank for rank in waiting if self._flags[rank][slot] < value]

    def _look_after(self, waiting: list[int], slot: int, value: int, waited: float) -> None:
        for rank in waiting:
            ended = bool(select.select([self._handles[rank]], [], [], 0)[0])
            if ended and self._flags[rank][slot] < value:
                raise WorkerLost(
                    f"Rank {self._world.rank} lost rank {rank}: its process {self._pids[rank]} ended. "
                    f"The cause stands in the output of rank {rank}."
                )
        if waited > self._world.timeout:
            named = ", ".join(str(rank) for rank in waiting)
            raise WorkerLost(
                f"Rank {self._world.rank} waited {waited:.0f} s for rank {named} (timeout_seconds). "
                f"Look at the output of rank {named}: it is stopped, or busy with something else."
            )


def _close(handles: list[int]) -> None:
    for handle in handles:
        os.close(handle)


def _share(world: World, size: int) -> list[mmap.mmap] | None:
    """One block of each worker; none on a worker that cannot see the blocks of all others.

    The blocks have no name in any file system, so nothing is left behind however the workers end.
    """
    own, token = os.memfd_create("paceline"), os.urandom(_TOKEN_BYTES)
    os.ftruncate(own, size + _TOKEN_BYTES)
    os.pwrite(own, token, size)
    told = world.gather((os.getpid(), own, token), "sharing memory")
    blocks = [_open(pid, handle, token, size) for pid, handle, token in told]
    everyone = world.gather(None not in blocks, "sharing memory")
    os.close(own)
    return [block for block in blocks if block is not None] if all(everyone) else None


def _open(pid: int, handle: int, token: bytes, size: int) -> mmap.mmap | None:
    """The block of a worker, recognised by its token: another machine may have the same process and file numbers."""
    try:
        opened = os.open(f"/proc/{pid}/fd/{handle}", os.O_RDWR)
    except OSError:
        return None
    try:
        return mmap.mmap(opened, size) if os.pread(opened, _TOKEN_BYTES, size) == token else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(opened)
