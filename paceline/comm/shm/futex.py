"""Linux futex: a number in shared memory on which processes sleep until another process changes it."""

from __future__ import annotations

import ctypes
import errno
import threading

_SYSCALL = 202
"""Number of the system call on x86-64, the only processor on which memory is shared (``arena.can_share``)."""
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1
_libc = ctypes.CDLL(None, use_errno=True)


_lock = threading.Lock()


def fence() -> None:
    """Make all earlier stores of this process visible before its later loads (see ``comm.shm.arena``)."""
    with _lock:  # a locked instruction, which on x86-64 is a full barrier
        pass


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """Futex that one process wakes and the others wait on. A wake takes 1 us if no process waits.

    Args:
        offset: offset of the number in the block in bytes, a multiple of 4.
    """

    def __init__(self, block: memoryview, offset: int) -> None:
        self._count = ctypes.c_uint32.from_buffer(block, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._count))

    @property
    def count(self) -> int:
        """Number of wakes. Read it before checking the condition."""
        return self._count.value

    def wake(self) -> None:
        self._count.value += 1
        _libc.syscall(_SYSCALL, self._address, _WAKE, _ALL, None, None, 0)

    def wait(self, count: int, seconds: float) -> None:
        """Sleep for at most ``seconds``, less than 1, until the next wake. Return at once if the count has changed."""
        limit = _Timespec(0, int(seconds * 1e9))
        if _libc.syscall(_SYSCALL, self._address, _WAIT, count, ctypes.byref(limit), None, 0) == 0:
            return
        if ctypes.get_errno() not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(ctypes.get_errno(), "futex")
