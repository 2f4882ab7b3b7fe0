"""Shared memory of the workers of one machine, with flags that announce written data.

A flag is a number that only grows. No data goes through a socket. The end of a worker is detected by its process.
A worker has one open file for each worker of its machine, including itself, and no others.

The code relies on the memory order of x86-64 (total store order), so memory is shared only there (:func:`can_share`):

* an aligned 8-byte number, written as an item of a ``memoryview``, is never seen half written;
* stores become visible in program order, and loads run in program order, so a worker that sees a flag also sees the
  data that was written before it. Other processors would need a release store and an acquire load;
* a load may run before an *earlier store to another address* is visible. Where two processes each store and then load
  the value that the other process has stored, there is a ``futex.fence`` in between.

A worker that was dropped and may still run keeps its mappings. The other workers then switch to new arenas
(``Generation.fenced``), so the dropped worker cannot change memory that they use.
"""

from __future__ import annotations

import mmap
import os
import platform
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.comm.shm.backoff import FIRST_BACKOFF_SECONDS, POLL_SECONDS, backoff_seconds
from paceline.comm.shm.futex import Futex
from paceline.comm.shm.lock import CheckPeers, Lock
from paceline.comm.shm.mapping import map_shared
from paceline.comm.waiting import Waiting
from paceline.coordinator.types import Member
from paceline.errors import WorkerLost
from paceline.launchers.local.kernel import is_ending, start_of

if TYPE_CHECKING:
    from paceline.comm.waiting import Waiting
    from paceline.coordinator.types import Member

_SLOTS = 1 << 15
_SPINS = 20
"""Number of polls before the first sleep. They take about 10 us, a fifth of the time to sleep and be woken."""
_SPIN_SECONDS = 1e-4
"""Least duration of a wait without sleep that is recorded. On a busy machine a yield of the processor takes longer."""
_SLEEP_SECONDS = 5e-3  # longest sleep of a waiting worker without a wake-up, because the worker must also notice losses
_TOKEN_BYTES = 16
_ARENA_BYTES = 1 << 42
_MESSAGES_AT = 1 << 41
_MESSAGE_BYTES = 1 << 36
_RINGS_AT = _MESSAGES_AT + (1 << 40)
_GENERATION, _GAVE_UP, _MESSAGE, _FUTEX = 0, 1, 2, 3
"""Reserved flags: the generation of a worker, whether it gave up, its number of all-gathers, and its futex."""


class Arena:
    """Shared memory that one worker owns: an anonymous file (memfd).

    The file is sparse and far larger than any use of it. It is kept when the membership changes, because touching pages
    that are in use costs a tenth of touching new pages.
    """

    def __init__(self) -> None:
        self.file, self.token = os.memfd_create("paceline"), os.urandom(_TOKEN_BYTES)
        os.ftruncate(self.file, _ARENA_BYTES)
        os.pwrite(self.file, self.token, 0)
        weakref.finalize(self, os.close, self.file)

    def reset(self) -> None:
        """Clear all flags but the first, and free the ring buffers. Workers that might still read them have left."""
        os.ftruncate(self.file, _RINGS_AT)
        os.ftruncate(self.file, _ARENA_BYTES)
        os.pwrite(self.file, bytes((_SLOTS - 1) * 8), mmap.PAGESIZE + 8)

    def announce(self, generation: int, able: bool) -> None:
        """Announce that this worker has reached a generation, and whether it has opened the arenas of all members."""
        os.pwrite(self.file, struct.pack("<q", 2 * (generation + 1) + able), mmap.PAGESIZE)

    @property
    def handle(self) -> tuple[int, str]:
        """File descriptor in this process, and token that identifies the file."""
        return self.file, self.token.hex()


def can_share() -> bool:
    """Return whether this worker can share host memory with other workers of its machine."""
    ordered = platform.machine() in ("x86_64", "AMD64")  # stores become visible in program order
    return ordered and hasattr(os, "memfd_create")


def attach_members(waiting: Waiting, arena: Arena, members: Sequence[Member], generation: int) -> SharedMemory | None:
    """Open the arenas of a generation's members without any message. Return None if a member cannot open them all."""
    files = [
        _open(member.pid, member.arena[0], bytes.fromhex(member.arena[1])) if member.arena else None
        for member in members
    ]
    opened = [file for file in files if file is not None]
    arena.reset()
    arena.announce(generation, len(opened) == len(files))
    if len(opened) < len(files):
        _close(opened)
        return None
    shared_memory = SharedMemory(waiting, opened, [member.pid for member in members], range(len(members)))
    reached = shared_memory.reached = 2 * (generation + 1)
    try:
        shared_memory.wait(_GENERATION, reached)
    except WorkerLost:
        shared_memory.give_up()  # other workers may already wait for this worker
        raise
    return shared_memory if shared_memory.announced(_GENERATION, reached + 1, range(len(members))) else None


def attach_hosts(waiting: Waiting, arena: Arena | None, gather: Callable[[Any, str], list[Any]]) -> SharedMemory | None:
    """Open the arenas of this machine's workers, found by ``gather``. Return None if a worker of any machine cannot.

    Args:
        gather: function like ``World.gather``. All workers of all machines must call this function together.
    """
    if arena is not None:
        arena.reset()
    handles = gather(None if arena is None else (os.getpid(), arena.file, arena.token), "start")
    ranks = waiting.membership.near
    known = [handles[rank] for rank in ranks if handles[rank] is not None]
    opened = [file for file in (_open(*handle) for handle in known) if file is not None]
    if not all(gather(len(opened) == len(ranks), "start")):
        _close(opened)
        return None
    return SharedMemory(waiting, opened, [pid for pid, *_ in known], ranks)


def attach_alone(waiting: Waiting) -> SharedMemory | None:
    """Return memory for the only worker of a machine, to be used as if others shared it. None if it has none."""
    if not can_share():
        return None
    arena = Arena()  # closes its file
    return SharedMemory(waiting, [os.dup(arena.file)], [os.getpid()], [waiting.rank])


class SharedMemory:
    """Shared blocks of memory, one per worker, with flags that announce their contents.

    All workers must share blocks and reserve flags in the same order, so that no offset has to be exchanged. The
    initial content of a block is undefined. Blocks and flags are in the order of ``ranks``. A ``place`` is an index in
    ``ranks``, and equals the rank if all workers of the run are on this machine.

    Attributes:
        reached: flag value of a worker that has reached this generation. Before, its flags are from an earlier one.
        rewound: number of calls of :meth:`rewind`.
    """

    reached = rewound = 0

    def __init__(self, waiting: Waiting, files: list[int], pids: list[int], ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.place = self.ranks.index(waiting.rank)
        self._waiting, self._files = waiting, files
        self._next = mmap.PAGESIZE
        self.close = weakref.finalize(self, _close, files)
        self._processes = [(pid, _start_of(rank, pid)) for rank, pid in zip(self.ranks, pids, strict=True)]
        blocks = self.share(_SLOTS * 8)
        self._flags = [block.cast("q") for block in blocks]
        self._futexes = [Futex(block, 8 * _FUTEX) for block in blocks]
        self._reserved = _FUTEX + 1
        self._messages = self._locks = 0

    def share(self, size: int) -> list[memoryview]:
        """Map a new block of each worker, and return them by place. All workers must pass the same size."""
        size = -(-max(size, 1) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        blocks = [map_shared(file, size, self._next) for file in self._files]
        self._next += size
        return blocks

    def new_file(self, size: int) -> int:
        """Return a descriptor of a new anonymous file that all workers open together, for the caller to close.

        No block lies in it, so it outlives this membership as long as a worker has mapped it.
        """
        file, token = (os.memfd_create("paceline"), os.urandom(_TOKEN_BYTES)) if self.place == 0 else (-1, b"")
        if self.place == 0:
            os.pwrite(file, token, 0)
            os.ftruncate(file, size)
        opened: int | None = file if self.place == 0 else None
        try:
            handle = self.all_gather(struct.pack("<q", file) + token)[0]
            if self.place:
                number = int.from_bytes(handle[:8], "little", signed=True)
                opened = _open(self._processes[0][0], number, handle[8:])
            if not all(self.all_gather(b"" if opened is None else b"opened")) or opened is None:
                raise OSError(f"The workers of this machine cannot all open {size} bytes of memory that they share.")
        except BaseException:
            if opened is not None:
                os.close(opened)
            raise
        return opened

    def reserve(self, slots: int) -> int:
        """Reserve a number of flags and return the first. All workers must reserve flags in the same order."""
        first, self._reserved = self._reserved, self._reserved + slots
        assert self._reserved <= _SLOTS, f"more than {_SLOTS} flags"
        return first

    def mark(self) -> tuple[int, int]:
        """Return where the next block and the next flag will be, for :meth:`rewind`."""
        return self._next, self._reserved

    def rewind(self, mark: tuple[int, int]) -> None:
        """Free all blocks and flags since a mark. All workers must call this together, when they are done with them."""
        start, reserved = mark
        self.all_gather(b"")  # a slower worker may still wait for the flags
        count = self._reserved - reserved
        self._flags[self.place][reserved : self._reserved] = memoryview(bytes(8 * count)).cast("q")
        self._next, self._reserved = start, reserved
        self.rewound += 1
        self.all_gather(b"")

    def lock(self, check_peers: CheckPeers | None = None) -> Lock:
        """Create a lock. All workers must create their locks in the same order.

        Args:
            check_peers: see :class:`Lock`. Defaults to a check that the awaited workers are alive.
        """
        self._locks += 1
        slot = self.reserve(1)
        holder = self._flags[0][slot : slot + 1]
        return Lock(self._files[0], _ARENA_BYTES - self._locks, holder, self._waiting, check_peers or self._check)

    def all_gather(self, message: bytes) -> list[bytes]:
        """Return the message of each worker, in rank order. All workers must call this method together.

        Two buffers suffice, because a worker reuses a buffer only after all workers have read its previous message.
        """
        self._messages += 1
        start = _MESSAGES_AT + self._messages % 2 * _MESSAGE_BYTES
        os.pwrite(self._files[self.place], struct.pack("<q", len(message)) + message, start)
        self.announce(_MESSAGE, self._messages)
        self.wait(_MESSAGE, self._messages)
        sizes = [struct.unpack("<q", os.pread(file, 8, start))[0] for file in self._files]
        return [os.pread(file, size, start + 8) for file, size in zip(self._files, sizes, strict=True)]

    def write(self, offset: int, data: memoryview) -> int:
        """Write bytes into the ring buffers of this worker, and return their number."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._files[self.place], data[done:], _RINGS_AT + offset + done)
        return done

    def read(self, place: int, offset: int, into: memoryview) -> int:
        """Read bytes from the ring buffers of a worker, and return their number."""
        done = 0
        while done < len(into):
            done += os.preadv(self._files[place], [into[done:]], _RINGS_AT + offset + done)
        return done

    def give_up(self) -> None:
        """Announce that this worker will make no further announcements."""
        self._flags[self.place][_GAVE_UP] = 1
        self._futexes[self.place].wake()

    def announce(self, slot: int, value: int) -> None:
        """Raise a flag of this worker to a value."""
        self._flags[self.place][slot] = value
        self._futexes[self.place].wake()

    def announced(self, slot: int, value: int, places: Sequence[int]) -> bool:
        """Return whether the workers at these places have announced at least this value."""
        return all(self._flags[place][slot] >= value for place in places)

    def wait(self, slot: int, value: int, places: Sequence[int] | None = None) -> None:
        """Wait until all workers, or those at ``places``, have raised a flag to at least this value."""
        awaited = range(len(self._flags)) if places is None else places
        waiting = [place for place in awaited if self._flags[place][slot] < value]
        polls = 0
        begin = checked = time.monotonic()
        alarmed = told = False
        while waiting:
            polls += 1
            if polls < _SPINS:
                os.sched_yield()
            else:
                futex = self._futexes[waiting[0]]
                count = futex.count
                if self._flags[waiting[0]][slot] < value:
                    futex.wait(count, _SLEEP_SECONDS)
            now = time.monotonic()
            if not told and (polls >= _SPINS or now - begin > _SPIN_SECONDS):
                told = True
                self._waiting.waits_for(self._ranks(waiting), begin)
            if polls >= _SPINS and (now - checked > POLL_SECONDS or self._waiting.alarmed != alarmed):
                checked, alarmed = now, self._waiting.alarmed
                self._check_alive(waiting, slot, value, now - begin)
            waiting = [place for place in waiting if self._flags[place][slot] < value]
            if told:
                self._waiting.waits_for(self._ranks(waiting))

    def wait_until(self, ready: Callable[[], bool], awaited: Callable[[], list[int]]) -> None:
        """Wait until a condition on the blocks is true.

        Args:
            awaited: function that returns the places of the workers on which the condition currently depends.
        """
        polls, sleep = 0, FIRST_BACKOFF_SECONDS
        begin = checked = 0.0
        places: list[int] = []
        while not ready():
            polls += 1
            if polls < _SPINS:
                os.sched_yield()
                continue
            time.sleep(sleep)
            now = time.monotonic()
            sleep = backoff_seconds(now - begin if begin else 0.0)
            if not begin or now - checked > POLL_SECONDS:
                self._waiting.check()
                if (now_awaited := awaited()) != places or not begin:
                    places = now_awaited
                    self._waiting.waits_for(self._ranks(places))
                begin, checked = begin or now, now
                self.check_alive(places, now - begin)
        if begin:
            self._waiting.waits_for(())

    def check_alive(self, places: list[int], waited: float) -> None:
        """Check that the workers at these places are alive, after a wait of ``waited`` seconds."""
        self._check_alive(places, _GAVE_UP, 2, waited)

    def _check(self, places: list[int], waited: float) -> None:
        self._waiting.check()
        self.check_alive(places, waited)

    def _ranks(self, places: Sequence[int]) -> list[int]:
        return [self.ranks[place] for place in places]

    def _check_alive(self, waiting: list[int], slot: int, value: int, waited: float) -> None:
        if self._waiting.recorder is not None:
            self._waiting.recorder.check()
        for place in waiting:
            gone, rank = self.gone(place), self.ranks[place]
            if gone and self._flags[place][slot] < value:
                lost = WorkerLost(
                    f"Rank {self._waiting.rank} lost rank {rank}: {gone}. See the output of rank {rank} for the cause.",
                    ranks=(rank,),
                )
                raise self._waiting.explain(lost)
        self._waiting.check_silence(self._ranks(waiting), waited)

    def gone(self, place: int) -> str:
        """Return why the worker at this place will make no further announcements, or an empty string if it may.

        After a loss, workers still wait for the surviving workers, so that either all of them finish a step or none.
        """
        pid, started = self._processes[place]
        if is_ending(pid, started):
            return f"its process {pid} ended"
        if self._flags[place][_GENERATION] >= self.reached and self._flags[place][_GAVE_UP]:
            return "it stopped waiting for others"
        return "it was dropped" if self._waiting.is_missing(self.ranks[place]) else ""


def _start_of(rank: int, pid: int) -> int:
    """Return the start time of a worker's process. Its arena was open a moment ago, so the pid was not reused."""
    if (started := start_of(pid)) is None:
        raise WorkerLost(f"Rank {rank} was lost at the start: its process {pid} ended.")
    return started


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


def _open(pid: int, handle: int, token: bytes) -> int | None:
    """Open a worker's arena, verified by its token, as another machine may have the same pid and descriptor."""
    try:
        opened = os.open(f"/proc/{pid}/fd/{handle}", os.O_RDWR)
    except OSError:
        return None
    try:
        if os.pread(opened, _TOKEN_BYTES, 0) == token:
            return opened
    except OSError:
        pass
    os.close(opened)
    return None
