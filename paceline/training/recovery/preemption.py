"""Preemption notices: on a signal, a worker finishes its step and leaves the run.

Spot machines, Slurm and Kubernetes send SIGTERM, or SIGUSR1 if configured, some time before they kill a process.
"""

from __future__ import annotations

import signal
import threading

from paceline.comm.world import World

_NOTICES = (signal.SIGTERM, signal.SIGUSR1)


def catch_notices(world: World) -> None:
    """Install handlers for SIGTERM and SIGUSR1 that make this worker leave after its current step.

    A second signal has no effect; signals often come twice, from the machine and from the launcher. Handlers of the
    script are kept. Does nothing outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return

    def leave(*_: object) -> None:
        world.request_leave()

    for number in _NOTICES:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, leave)
