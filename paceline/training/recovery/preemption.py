"""Preemption notices: on a signal, a worker finishes its step and leaves the run.

Spot machines, Slurm and Kubernetes send SIGTERM, or SIGUSR1 if configured, some time before they kill a process.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from paceline.comm.world import World

_NOTICES = (signal.SIGTERM, signal.SIGUSR1)
_handlers: dict[int, Callable[..., None]] = {}  # handlers that this module has installed, by signal


def catch_notices(world: World) -> None:
    """Install handlers for SIGTERM and SIGUSR1 that make this worker leave after its current step.

    A second signal has no effect; signals often come twice, from the machine and from the launcher. Handlers of the
    script are kept, and processes that the script forks end on these signals as usual. Does nothing outside of the main
    thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return

    def leave(*_: object) -> None:
        world.request_leave()

    for number in _NOTICES:
        if signal.getsignal(number) in (signal.SIG_DFL, _handlers.get(number, signal.SIG_DFL)):
            _handlers[number] = leave
            signal.signal(number, leave)


def release_notices() -> None:
    """Let a process end on a signal again, unless the script has installed a handler since.

    A session that has closed has no step to finish, nor has a forked process, such as one of a
    ``multiprocessing.Pool``. Does nothing outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number, handler in _handlers.items():
        if signal.getsignal(number) is handler:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=release_notices)
