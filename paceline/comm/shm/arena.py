"""Memory that all workers of one machine see, and the announcements that go with it.

What a worker writes is seen by the others at once; that it is complete is announced in a flag, a number that only
grows. No byte goes through a socket, and the end of a worker is seen through its process handle.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.comm.shm.backoff import FIRST_BACKOFF_SECONDS, LOOK_SECONDS, backoff_seconds
from paceline.comm.shm.futex import Futex
from paceline.comm.shm.lock import Lock, Look
from paceline.comm.waiting import Waiting
from paceline.coordinator.types import Member
from paceline.errors import WorkerLost, WorkerSilent, name_ranks
from paceline.launch.kernel import is_ending

if TYPE_CHECKING:
    import torch

    from paceline.comm.waiting import Waiting
    from paceline.coordinator.types import Member

_SLOTS = 1 << 15
_SPINS = 20
"""Looks before the first sleep: about 10 us, a fifth of what it takes to sleep and be woken."""
_LISTEN_SECONDS = 5e-3
"""How long a waiting worker sleeps if nobody wakes it: it must hear of a loss, too."""
_TOKEN_BYTES = 16
_ARENA_BYTES = 1 << 42
_LETTERS_AT = 1 << 41
_LETTER_BYTES = 1 << 36
_PLACES_AT = _LETTERS_AT + (1 << 40)
_MET, _GAVE_UP, _LETTER, _BELL = 0, 1, 2, 3
"""The first flags: in which generation a worker was met, whether it gave up, how often it compared notes, and how often
it announced anything."""


class Arena:
    """The memory of one worker: a file without a name in any file system.

    It is far larger than any use of it; only what is written takes room. It is used again when the workers change:
    memory that is in use already costs a tenth of new one.
    """

    def __init__(self) -> None:
        self.file, self.token = os.memfd_create("paceline"), os.urandom(_TOKEN_BYTES)
        os.ftruncate(self.file, _ARENA_BYTES)
        os.pwrite(self.file, self.token, 0)
        weakref.finalize(self, os.close, self.file)

    def begin(self) -> None:
        """Take back all announcements but the first; the workers that may still read them are gone or have left.

        What was on its way between workers (``comm.shm.ring``) takes no memory any more.
        """
        os.ftruncate(self.file, _PLACES_AT)
        os.ftruncate(self.file, _ARENA_BYTES)
        os.pwrite(self.file, bytes((_SLOTS - 1) * 8), mmap.PAGESIZE + 8)

    def meet(self, generation: int, able: bool) -> None:
        """Announce that this worker has come to a generation, and whether it sees the arenas of all others."""
        os.pwrite(self.file, struct.pack("<q", 2 * (generation + 1) + able), mmap.PAGESIZE)

    @property
    def handle(self) -> tuple[int, str]:
        """By what others find it: the number of the file in this process, and a token to recognise it."""
        return self.file, self.token.hex()


def can_share(device: torch.device) -> bool:
    """Whether this worker could share memory with others of its machine."""
    ordered = platform.machine() in ("x86_64", "AMD64")  # stores become visible in the order they are made
    return ordered and hasattr(os, "memfd_create") and hasattr(os, "pidfd_open") and device.type == "cpu"


def attach_members(waiting: Waiting, arena: Arena, members: Sequence[Member], generation: int) -> SharedMemory | None:
    """Attach to the arenas of members of a membership, without a word over the network; none if that is not possible.

    Raises:
        WorkerLost: one of them was lost on the way.
    """
    files = [
        _open(member.pid, member.arena[0], bytes.fromhex(member.arena[1])) if member.arena else None
        for member in members
    ]
    opened = [file for file in files if file is not None]
    arena.begin()
    arena.meet(generation, len(opened) == len(files))
    if len(opened) < len(files):
        _close(opened)
        return None
    memory = SharedMemory(waiting, opened, [member.pid for member in members])
    met = 2 * (generation + 1)
    memory.wait(_MET, met)
    return memory if memory.announced(_MET, met + 1, range(len(members))) else None


def attach_all(waiting: Waiting, arena: Arena, gather: Callable[[Any, str], list[Any]]) -> SharedMemory | None:
    """Attach to the arenas of all workers, which tell each other by ``gather``; none if one of them cannot."""
    arena.begin()
    handles = gather((os.getpid(), arena.file, arena.token), "start")
    files = [_open(pid, handle, token) for pid, handle, token in handles]
    all_attached = all(gather(None not in files, "start"))
    opened = [file for file in files if file is not None]
    if not all_attached:
        _close(opened)
        return None
    return SharedMemory(waiting, opened, [pid for pid, *_ in handles])


class SharedMemory:
    """Blocks of memory, one of each worker, and flags to announce what is in them.

    Workers share the same blocks of their arenas in the same order, so that their places need no words. What a block
    holds at first is not known.
    """

    def __init__(self, waiting: Waiting, files: list[int], pids: list[int]) -> None:
        self._waiting = waiting
        self._files = files
        self._next = mmap.PAGESIZE
        opened = list(files)
        self.close = weakref.finalize(self, _close, opened)
        self._handles: dict[int, int] = {}
        for rank, pid in enumerate(pids):
            if rank != waiting.rank:
                self._handles[rank] = _handle(rank, pid)
                opened.append(self._handles[rank])
        self._pids = pids
        blocks = self.share(_SLOTS * 8)
        self._flags = [memoryview(block).cast("q") for block in blocks]
        self._bells = [Futex(block, 8 * _BELL) for block in blocks]
        self._reserved = _BELL + 1
        self._letters = self._locks = 0

    def share(self, size: int) -> list[mmap.mmap]:
        """A new block of each worker, in the order of ranks; all workers call this with the same size."""
        size = -(-max(size, 1) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        blocks = [mmap.mmap(file, size, offset=self._next) for file in self._files]
        self._next += size
        return blocks

    def reserve(self, slots: int) -> int:
        """The first of so many flags for a use of their own; all workers reserve in the same order."""
        first, self._reserved = self._reserved, self._reserved + slots
        assert self._reserved <= _SLOTS, f"more than {_SLOTS} flags"
        return first

    def lock(self, look: Look | None = None) -> Lock:
        """A lock for a use of its own; all workers ask in the same order.

        Args:
            look: see :class:`Lock`; none: whether those can still do something whom this worker waits for.
        """
        self._locks += 1
        slot = self.reserve(1)
        holder = self._flags[0][slot : slot + 1]
        return Lock(self._files[0], _ARENA_BYTES - self._locks, holder, self._waiting, look or self._check_and_look)

    def exchange(self, letter: bytes) -> list[bytes]:
        """What each worker writes, in the order of ranks; all workers call this together.

        Two places are enough: a worker writes its next letter but one after all have read this one.
        """
        self._letters += 1
        place = _LETTERS_AT + self._letters % 2 * _LETTER_BYTES
        os.pwrite(self._files[self._waiting.rank], struct.pack("<q", len(letter)) + letter, place)
        self.announce(_LETTER, self._letters)
        self.wait(_LETTER, self._letters)
        sizes = [struct.unpack("<q", os.pread(file, 8, place))[0] for file in self._files]
        return [os.pread(file, size, place + 8) for file, size in zip(self._files, sizes, strict=True)]

    def write(self, place: int, data: memoryview) -> int:
        """Put bytes into a place of this worker's, of those that are not part of a block; returns how many."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._files[self._waiting.rank], data[done:], _PLACES_AT + place + done)
        return done

    def read(self, rank: int, place: int, into: memoryview) -> int:
        """What a worker wrote in a place; returns how many bytes."""
        done = 0
        while done < len(into):
            done += os.preadv(self._files[rank], [into[done:]], _PLACES_AT + place + done)
        return done

    def give_up(self) -> None:
        """Tell the others that this worker announces nothing more."""
        self._flags[self._waiting.rank][_GAVE_UP] = 1
        self._bells[self._waiting.rank].ring()

    def announce(self, slot: int, value: int) -> None:
        """Tell the others that this worker got so far."""
        self._flags[self._waiting.rank][slot] = value
        self._bells[self._waiting.rank].ring()

    def announced(self, slot: int, value: int, ranks: Sequence[int]) -> bool:
        """Whether these workers have announced at least this value."""
        return all(self._flags[rank][slot] >= value for rank in ranks)

    def wait(self, slot: int, value: int, ranks: Sequence[int] | None = None) -> None:
        """Wait until all workers, or these, have announced at least this value.

        Raises:
            WorkerLost: a worker ended, or stayed silent for the timeout.
        """
        awaited = range(len(self._flags)) if ranks is None else ranks
        waiting = [rank for rank in awaited if self._flags[rank][slot] < value]
        looks = 0
        begin = looked = 0.0
        alarmed = False
        while waiting:
            looks += 1
            if looks < _SPINS:
                os.sched_yield()
            else:
                bell = self._bells[waiting[0]]
                count = bell.count
                if self._flags[waiting[0]][slot] < value:
                    bell.listen(count, _LISTEN_SECONDS)
                now = time.monotonic()
                if not begin:
                    begin = looked = now
                    self._waiting.waits_for(waiting)
                if now - looked > LOOK_SECONDS or self._waiting.alarmed != alarmed:
                    looked, alarmed = now, self._waiting.alarmed
                    self._look_after(waiting, slot, value, now - begin)
            waiting = [rank for rank in waiting if self._flags[rank][slot] < value]
        if begin:
            self._waiting.waits_for(())

    def until(self, ready: Callable[[], bool], awaited: Callable[[], list[int]]) -> None:
        """Wait until something is so in the blocks.

        Args:
            ready: whether it is.
            awaited: on which workers that depends now.

        Raises:
            WorkerLost: a worker was lost, or one of those stayed silent for the timeout.
        """
        looks, nap = 0, FIRST_BACKOFF_SECONDS
        begin = looked = 0.0
        ranks: list[int] = []
        while not ready():
            looks += 1
            if looks < _SPINS:
                os.sched_yield()
                continue
            time.sleep(nap)
            now = time.monotonic()
            nap = backoff_seconds(now - begin if begin else 0.0)
            if not begin or now - looked > LOOK_SECONDS:
                self._waiting.check()
                if (now_awaited := awaited()) != ranks or not begin:
                    ranks = now_awaited
                    self._waiting.waits_for(ranks)
                begin, looked = begin or now, now
                self.look(ranks, now - begin)
        if begin:
            self._waiting.waits_for(())

    def look(self, ranks: list[int], waited: float) -> None:
        """Look whether these workers, for whom this one has waited so many seconds, can still do something.

        Raises:
            WorkerLost: one of them was lost, or they stayed silent for the timeout.
        """
        self._look_after(ranks, _GAVE_UP, 2, waited)

    def _check_and_look(self, ranks: list[int], waited: float) -> None:
        self._waiting.check()
        self.look(ranks, waited)

    def _look_after(self, waiting: list[int], slot: int, value: int, waited: float) -> None:
        if self._waiting.recorder is not None:
            self._waiting.recorder.look()
        for rank in waiting:
            gone = self.gone(rank)
            if gone and self._flags[rank][slot] < value:
                lost = WorkerLost(
                    f"Rank {self._waiting.rank} lost rank {rank}: {gone}. See the log of rank {rank} for the cause."
                )
                lost.ranks = (rank,)
                raise self._waiting.explain(lost)
        if waited > self._waiting.timeout:
            ranks = waiting or self._waiting.others
            named, are = name_ranks(ranks), "it is" if len(ranks) == 1 else "they are"
            purpose = f" {self._waiting.purpose}" if self._waiting.purpose else ""
            silent = WorkerSilent(
                f"Rank {self._waiting.rank} waited {waited:.0f} s for {named}{purpose} (timeout_seconds). "
                f"See the log of {named}: {are} stopped, or busy with something else."
            )
            raise self._waiting.explain(silent)

    def gone(self, rank: int) -> str:
        """Why a worker will announce nothing more; empty if it may.

        A worker that is told of a loss still waits for those who live: so either all of them finish a step, or none.
        """
        poll = select.poll()  # select() takes no number above 1023
        poll.register(self._handles[rank], select.POLLIN)
        if poll.poll(0) or is_ending(self._pids[rank]):
            return f"its process {self._pids[rank]} ended"
        if self._flags[rank][_GAVE_UP]:
            return "it stopped waiting for others"
        return "it was dropped" if self._waiting.is_missing(rank) else ""


def _handle(rank: int, pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise WorkerLost(f"Rank {rank} was lost at the start: its process {pid} ended.") from None


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


def _open(pid: int, handle: int, token: bytes) -> int | None:
    """The file of a worker, recognised by its token: another machine may have the same process and file numbers."""
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
