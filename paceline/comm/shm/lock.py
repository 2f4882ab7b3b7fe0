"""Lock between the processes of one machine. The kernel releases the lock when its holder ends."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable
from types import TracebackType

from paceline.comm.shm.backoff import POLL_SECONDS, backoff_seconds
from paceline.comm.waiting import Waiting

_YIELDS = 50

CheckPeers = Callable[[list[int], float], None]
"""Function called periodically while others hold the lock, with their ranks and the seconds waited. May raise."""


class Lock:
    """Lock on one byte of a file (2 us). A killed holder does not block the other processes.

    Args:
        file: file descriptor. Each process must have opened the file itself.
        offset: offset of the byte, which may lie beyond the end of the file.
        holder: number in shared memory for the rank of the holder.
    """

    def __init__(self, file: int, offset: int, holder: memoryview, waiting: Waiting, check_peers: CheckPeers) -> None:
        self._file = file
        self._acquire = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
        self._release = struct.pack("hhqqi", fcntl.F_UNLCK, os.SEEK_SET, offset, 1, 0)
        self._holder, self._waiting, self._check_peers = holder, waiting, check_peers

    def __enter__(self) -> None:
        polls, begin, checked = 0, 0.0, 0.0
        ranks: list[int] = []
        while not self._try_acquire():
            polls += 1
            if polls < _YIELDS:
                os.sched_yield()
                continue
            now = time.monotonic()
            begin, checked = begin or now, checked or now
            if now - checked > POLL_SECONDS:
                checked = now
                if (holders := self._holders()) != ranks:
                    ranks = holders
                    self._waiting.waits_for(ranks)
                self._check_peers(ranks, now - begin)
            time.sleep(backoff_seconds(now - begin))
        if ranks:
            self._waiting.waits_for(())
        self._holder[0] = self._waiting.rank

    def _holders(self) -> list[int]:
        """Return the ranks that may hold the lock: all others, until the new holder has replaced this worker's rank."""
        holder, own = self._holder[0], self._waiting.rank
        return [holder] if holder != own else self._waiting.others

    def _try_acquire(self) -> bool:
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, self._acquire)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, self._release)
