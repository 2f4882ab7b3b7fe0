"""Thread count and memory allocator settings of this worker's process."""

from __future__ import annotations

import ctypes
import os
import sys

from paceline.environments import env
from paceline.environments.start import Identity, threads_of
from paceline.settings import Settings

_LARGE, _LARGEST = 1 << 19, 1 << 25
"""Number of bytes of a tensor that has its own mapping: if large tensors are not kept, and always."""


def threads(settings: Settings, who: Identity) -> int:
    """Return the number of threads. With ``exact`` it ignores the number of workers, because it affects the bits."""
    if settings.threads:
        return settings.threads
    if settings.exact:
        return 1
    given = env.started_by().cores or _cores(os.getppid())
    return env.thread_limit() or threads_of(_cores(0), given, who.local_world_size)


def _cores(process: int) -> int:
    """Return the number of cores a process may use. A launcher may bind a worker to some cores, but not its parent."""
    try:
        return len(os.sched_getaffinity(process)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    except OSError:  # a process of another user
        return 1


def keep_freed_pages(large: bool = True) -> None:
    """Configure glibc to keep freed memory.

    By default each large tensor has its own mapping, which is returned to the kernel when freed. Every gradient of
    every step then causes page faults again, which cost a tenth of a step on the CPU. But an aligned tensor rarely fits
    into a gap of the heap, so kept tensors need about twice the memory. The largest are therefore never kept.

    Args:
        large: whether to keep the memory of large tensors.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # not glibc
        return
    trim_threshold, mmap_threshold = -1, -3
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_threshold, _LARGEST if large else _LARGE)
