"""Linux's futex: a number in shared memory on which processes sleep until another one changes it."""

from __future__ import annotations

import ctypes
import errno
import threading

_SYSCALL = 202
"""Number of futex on x86-64, the only processor on which memory is shared (``comm.shm.arena.can_share``)."""
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1
_libc = ctypes.CDLL(None, use_errno=True)


_lock = threading.Lock()


def fence() -> None:
    """Let others see what this process has stored before it loads anything more (see ``comm.shm.arena``)."""
    with _lock:  # a locked instruction, which on x86-64 is a full barrier
        pass


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """Woken by one process, waited on by the others (a wake takes 1 us if nobody waits).

    Args:
        block: of shared memory.
        offset: of the number in it, in bytes; a multiple of 4.
    """

    def __init__(self, block: memoryview, offset: int) -> None:
        self._count = ctypes.c_uint32.from_buffer(block, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._count))

    @property
    def count(self) -> int:
        """How often it was woken; read it before checking the condition."""
        return self._count.value

    def wake(self) -> None:
        """Wake all waiting processes."""
        self._count.value += 1
        _libc.syscall(_SYSCALL, self._address, _WAKE, _ALL, None, None, 0)

    def wait(self, count: int, seconds: float) -> None:
        """Sleep until it is woken, unless it was since it had this count; for less than a second."""
        limit = _Timespec(0, int(seconds * 1e9))
        if _libc.syscall(_SYSCALL, self._address, _WAIT, count, ctypes.byref(limit), None, 0) == 0:
            return
        if ctypes.get_errno() not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(ctypes.get_errno(), "futex")
