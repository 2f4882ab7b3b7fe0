"""The agent of a machine: keeps its workers going, and the roster up to date.

Both kinds decide what becomes of the workers of their machine (:class:`paceline.launch.workers.Supervisor`): the host's
holds the roster, a guest's tells it over the network.
"""

from __future__ import annotations

import time
from typing import Any

from paceline.coordinator.machines import Guest
from paceline.coordinator.server import Coordinator
from paceline.coordinator.types import Bounds
from paceline.errors import PREEMPTED
from paceline.failure.worker_report import record_of, signal_name
from paceline.launch.base import Launch, Request, WorkerExit

_RESTARTS = 100
"""Workers started anew in one run, at most."""
_CALM_SECONDS = 2.0
"""A new worker takes a core for seconds to start; first the others gather and take their step."""
_HOPELESS_SECONDS = 1.0, 3.0
_FIXED_SECONDS = 3.0, 10.0


def bounds_of(request: Request) -> Bounds:
    """How many workers a run must and may have."""
    here = request.workers
    fewest, most = request.nodes or (1, 1)
    patience = request.patience_seconds if request.elastic else 0.0
    least = request.least or here * fewest
    return Bounds(
        least=least,
        most=request.most or here * most,
        wanted=max(least, here),
        replaces=request.nodes is not None,
        patience=patience,
        drops=request.elastic,
    )


class HostAgent:
    """The agent that holds the roster.

    Args:
        launch: what was started.
        request: what was asked for.
        roster: of the run.
    """

    def __init__(self, launch: Launch, request: Request, roster: Coordinator) -> None:
        self._launch = launch
        self._elastic = request.elastic
        self._roster = roster
        self._restarts = 0
        self._due = [0.0] * request.standby

    def started(self, number: int, pid: int) -> None:
        self._roster.expect(number, pid)

    def ended(self, one: WorkerExit) -> bool:
        if one.code == 0:
            self._roster.finish(one.worker)
            return True
        if one.code == PREEMPTED:
            self._roster.leave(one.worker)
            return True
        report = told_by(self._launch, one.worker)
        if report is not None:
            return not self._roster.fail(one.worker, report)
        if self._elastic and self._restarts < _RESTARTS and self._roster.over is None:
            self._restarts += 1
            self._due.append(time.monotonic() + _CALM_SECONDS)
            self._roster.expect_soon()
        gathered = bool(self._roster.view)
        self._roster.lose(one.worker, f"{self._roster.name(one.worker)} {in_words(one.code)}")
        return gathered  # the roster tells the others, who save what there is

    def to_start(self) -> int:
        now = time.monotonic()
        due = [when for when in self._due if when <= now or self._roster.waits]
        self._due = self._due[len(due) :]
        return len(due) if self._roster.over is None else 0

    def shown(self) -> int:
        view = self._roster.view
        return view[0] if view else 0

    def over(self) -> bool:
        return self._roster.over is not None

    def interrupted(self) -> None:
        self._roster.preempt()

    def grace(self) -> tuple[float, float]:
        if not self._roster.view:
            return _HOPELESS_SECONDS
        grace = self._launch.grace_seconds
        return (grace, grace + 5.0) if self._elastic else _FIXED_SECONDS


class GuestAgent:
    """The agent of another machine than the roster's.

    Args:
        launch: what was started.
        request: what was asked for.
        guest: the connection to the roster.
    """

    def __init__(self, launch: Launch, request: Request, guest: Guest) -> None:
        self._launch = launch
        self._guest = guest
        self._restarts = 0
        self._spares = request.standby

    def started(self, number: int, pid: int) -> None:
        self._guest.tell({"type": "started", "worker": number})

    def ended(self, one: WorkerExit) -> bool:
        report = None if one.code in (0, PREEMPTED) else told_by(self._launch, one.worker)
        message: dict[str, Any] = {
            "type": "ended",
            "worker": one.worker,
            "code": one.code,
            "out_of_memory": one.out_of_memory,
        }
        self._guest.tell({**message, "report": report, "what": in_words(one.code)})
        if one.code not in (0, PREEMPTED) and report is None and self._restarts < _RESTARTS:
            self._restarts += 1
            self._spares += 1
        return True

    def to_start(self) -> int:
        count, self._spares = self._spares, 0
        return 0 if self.over() else count

    def shown(self) -> int:
        return self._launch.first

    def over(self) -> bool:
        self._guest.hear()
        return self._guest.broken or self._guest.over is not None

    def interrupted(self) -> None:
        """Its workers tell the others."""

    def grace(self) -> tuple[float, float]:
        return _FIXED_SECONDS if self._guest.broken else (self._launch.grace_seconds, self._launch.grace_seconds + 5.0)


def told_by(launch: Launch, number: int) -> dict[str, Any] | None:
    """What a worker itself wrote down of its failure; none if it was ended, or only lost another one."""
    report = record_of(launch, number)
    return report if report and not report["consequence"] else None


def in_words(code: int) -> str:
    """How a process ended: ``was ended by signal 9 (SIGKILL)``."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by signal {-code} ({signal_name(-code)})"
