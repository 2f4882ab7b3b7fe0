"""The notice that a machine is about to be taken away: finish the step and leave.

Spot machines, Slurm and Kubernetes send SIGTERM, or SIGUSR1 if asked to, some time before they kill.
"""

from __future__ import annotations

import signal
import threading

from paceline.comm.world import World

_NOTICES = (signal.SIGTERM, signal.SIGUSR1)


def catch_notices(world: World) -> None:
    """Let such a signal make this worker leave after its step.

    Signals often come twice, to all processes of a machine and from the launcher that passes its own on; the second
    changes nothing. Signals that the script handles itself stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        return

    def leave(*_: object) -> None:
        world.request_leave()

    for number in _NOTICES:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, leave)
