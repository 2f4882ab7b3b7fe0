"""The threads and the memory of this worker's process."""

from __future__ import annotations

import ctypes
import os
import sys

from paceline.environments import env
from paceline.environments.start import Identity, threads_of
from paceline.settings import Settings


def threads(settings: Settings, who: Identity) -> int:
    """Return the threads of this worker; they change the bits, so with ``exact`` they do not depend on the workers."""
    if settings.threads:
        return settings.threads
    if settings.exact:
        return 1
    given = env.started_by().cores or _cores(os.getppid())
    return env.thread_limit() or threads_of(_cores(0), given, who.local_world_size)


def _cores(process: int) -> int:
    """On how many cores a process may run; the parent of a worker that its engine has bound to some may run on all."""
    try:
        return len(os.sched_getaffinity(process)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    except OSError:  # of another user
        return 1


def keep_freed_pages() -> None:
    """Let the C library keep freed memory.

    Otherwise each large tensor is a mapping of its own, which returns to the kernel when freed: every gradient of every
    step then costs its page faults again, a tenth of a step on the CPU.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library than glibc
        return
    trim_threshold, mmap_threshold, largest = -1, -3, 2**31 - 1
    mallopt(trim_threshold, largest)
    mallopt(mmap_threshold, largest)
