"""Thread count of this worker's process."""

from __future__ import annotations

import os

from paceline.environments import env
from paceline.environments.start import Identity, threads_of
from paceline.settings import Settings


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
