"""A lock between the processes of one machine that the kernel takes back from a process that ends."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable
from types import TracebackType

_YIELDS = 50
_NAP_SECONDS = 5e-5
_LOOK_SECONDS = 0.02


class Lock:
    """One byte of a file, locked for this open file (2 us): nobody waits for a holder that was killed.

    Args:
        file: the number of an open file; each process must have opened it for itself.
        place: of the byte; it need not exist.
        look: called now and then while another process holds the lock, with the seconds waited; may raise.
    """

    def __init__(self, file: int, place: int, look: Callable[[float], None]) -> None:
        self._file = file
        self._take = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
        self._give = struct.pack("hhqqi", fcntl.F_UNLCK, os.SEEK_SET, place, 1, 0)
        self._look = look

    def __enter__(self) -> None:
        looks, begin = 0, 0.0
        while not self._taken():
            looks += 1
            if looks < _YIELDS:
                os.sched_yield()
                continue
            begin = begin or time.monotonic()
            time.sleep(_NAP_SECONDS)
            waited = time.monotonic() - begin
            if waited > _LOOK_SECONDS:
                self._look(waited)

    def _taken(self) -> bool:
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, self._take)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, self._give)
