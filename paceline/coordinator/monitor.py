"""Alerts for the user during a run, and the data for the report at its end.

::

    still waiting: ranks 0, 2 have waited 12 s in the all-reduce of bucket 2 at step 41; rank 1 is in the data loader
    still waiting: rank 1 (process 4242) has not reached paceline.start for 30 s; rank 0 has
    lost: rank 1 (process 4242 on a) was killed by signal 9 (SIGKILL)
"""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.coordinator.failure.coordinator_report import CoordinatorReport, LastSeen, LostWorker
from paceline.coordinator.hang_detection import WorkerStatus, describe
from paceline.coordinator.membership import MembershipProtocol
from paceline.errors import name_ranks
from paceline.launchers.base import WorkerExit
from paceline.launchers.local.kernel import STOPPED, state_of

_START_SECONDS = 30.0
_SILENT_SECONDS = 3.0  # largest age of a heartbeat that still shows what a worker is doing
_NAMED = 8  # largest number of workers to name in one line


@dataclass(frozen=True)
class Alert:
    """Alert of kind ``late``, ``absent``, ``lost``, ``short``, ``joined`` or ``unlike`` (a machine), with workers."""

    kind: str
    text: str
    workers: tuple[int, ...] = ()
    time: float = field(default_factory=time.monotonic)


class RunMonitor:
    """Monitor of a run for its coordinator."""

    def __init__(self, record: Callable[..., None], clock: Callable[[], float] = time.monotonic) -> None:
        # alerts that are not shown yet. The launcher takes them from the left.
        self.alerts: deque[Alert] = deque(maxlen=1000)
        self.late_workers: tuple[int, ...] = ()  # numbers of the workers that are late now
        self.hang_report = ""  # description of what every worker is doing; empty if no worker is late
        self.hang_seconds: float | None = None  # setting ``hang_seconds`` of the script, if set
        # timeout after which a worker gives up waiting, in seconds; None until a worker has registered
        self.timeout_seconds: float | None = None
        self.reports: dict[int, Mapping[str, Any]] = {}  # failure reports of workers, by number
        self.exits: list[WorkerExit] = []  # exits of workers on other machines
        # descriptions of how lost workers ended, by number. Other workers may detect a loss earlier.
        self.exit_texts: dict[int, str] = {}
        self._record, self._clock = record, clock
        self._last_seen: dict[int, LastSeen] = {}
        self._losses: list[LostWorker] = []
        self._joined = 0
        self._pids: dict[int, int] = {}
        self._first_ready: float | None = None
        self._next_alert = 0.0

    def started(self, number: int, pid: int) -> None:
        """Record the process id of a worker on this machine."""
        self._pids[number] = pid

    def pid_of(self, number: int) -> int:
        """Return the process id of a worker, or 0 if it runs on another machine."""
        return self._pids.get(number, 0)

    def record(self, event: str, statuses: Sequence[WorkerStatus], **fields: Any) -> None:
        """Record a membership event, add an alert for it, and store data for the report."""
        self._record(event, **fields)
        if event == "lost":
            number = fields["worker"]
            self._losses.append(LostWorker(number, fields["rank_lost"], time.time()))
            if fields["rank_lost"] is not None:
                self._last_seen.setdefault(number, last_seen_of(statuses, fields["rank_lost"]))
            self.alerts.append(Alert("lost", fields["reason"], (number,)))
        elif event == "short":
            self.alerts.append(Alert("short", fields["text"]))
        elif event == "membership" and fields["generation"] > 0 and fields["joined"]:
            joined = fields["joined"]
            self._joined += len(joined)
            names = ", ".join(map(str, joined))
            text = f"worker{'s' if len(joined) > 1 else ''} {names} joined: {len(fields['workers'])} workers train"
            self.alerts.append(Alert("joined", text, tuple(joined)))

    def report_late(
        self, statuses: Sequence[WorkerStatus], members: Sequence[int], late: Sequence[WorkerStatus], limit: float
    ) -> None:
        """Report late workers at once, and again after each further ``limit`` seconds."""
        numbers, now = tuple(members[one.rank] for one in late), self._clock()
        self.hang_report = describe(statuses)
        if stopped := [number for number in numbers if state_of(self._pids.get(number, 0)) == STOPPED]:
            names = ", ".join(f"{self._pids[number]} of rank {members.index(number)}" for number in stopped)
            self.hang_report += f"; stopped by a signal: process {names}"
        for one in late:
            self._last_seen[members[one.rank]] = last_seen_of(statuses, one.rank)
        if numbers != self.late_workers or now >= self._next_alert:
            self._record("hang-check", text=self.hang_report, late=[one.rank for one in late])
            self.alerts.append(Alert("late", f"still waiting: {self.hang_report}", numbers))
            self.late_workers, self._next_alert = numbers, now + limit

    def clear_late(self) -> None:
        """Reset the hang report, because no worker is late now."""
        self.late_workers, self.hang_report = (), ""

    def check_absent(self, membership: MembershipProtocol, now: float) -> tuple[tuple[int, ...], str] | None:
        """Alert about workers that have not reached their first ``paceline.start`` while others wait.

        Returns:
            numbers of the absent workers and a sentence about them once ``timeout_seconds`` have passed, else None.
        """
        ready = [one.number for one in membership.workers.values() if one.state == "ready"]
        missing = tuple(one.number for one in membership.workers.values() if one.state == "starting" and not one.about)
        if not ready or not missing:
            return None
        if self._first_ready is None:
            limit = self.hang_seconds or _START_SECONDS
            self._first_ready, self._next_alert = now, now + limit
        waited = now - self._first_ready
        several = len(missing) > 1
        text = f"{self._names(missing)} {'have' if several else 'has'} not reached paceline.start for {waited:.0f} s"
        text += f"; {name_ranks(ready)} {'has' if len(ready) == 1 else 'have'}"
        if now >= self._next_alert:
            self._next_alert = now + (self.hang_seconds or _START_SECONDS)
            self._record("absent", text=text, workers=list(missing))
            self.alerts.append(Alert("absent", f"still waiting: {text}", missing))
        if self.timeout_seconds is None or waited < self.timeout_seconds:
            return None
        for number in missing:
            self._last_seen[number] = LastSeen(None, "", "", tuple(ready), waited)
        return missing, text

    def _names(self, numbers: Sequence[int]) -> str:
        names = [f"rank {one}" + (f" (process {self._pids[one]})" if one in self._pids else "") for one in numbers]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return ", ".join(names[:_NAMED]) + more

    def report(
        self, membership: MembershipProtocol, statuses: Sequence[WorkerStatus], elastic: bool
    ) -> CoordinatorReport:
        over = membership.over or {}
        steps = [one.step for one in statuses]
        steps += [one.progress[0] for one in membership.workers.values() if one.progress is not None]
        processes = {number: (pid, platform.node()) for number, pid in self._pids.items()}
        processes |= {
            one.number: (one.about["pid"], one.about["host"]) for one in membership.workers.values() if one.about
        }
        return CoordinatorReport(
            code=over.get("code"),
            reason=over.get("reason", ""),
            kind=over.get("kind", ""),
            blamed=tuple(over.get("workers", ())),
            elastic=elastic,
            step=max(steps, default=0),
            ranks={number: rank for rank, number in enumerate(membership.members)},
            processes=processes,
            lost=tuple(self._losses),
            joined=self._joined,
            leaving=tuple(one.number for one in membership.workers.values() if one.leaving),
            last_seen=dict(self._last_seen),
            reports=dict(self.reports),
            exits=tuple(self.exits),
        )


def last_seen_of(statuses: Sequence[WorkerStatus], rank: int) -> LastSeen:
    """Return what a worker was doing, and which workers were waiting."""
    own = next((one for one in statuses if one.rank == rank), None)
    waiting = [one for one in statuses if one.waiting and one.rank != rank]
    seconds = max((one.since + one.silent for one in waiting), default=0.0)
    where = waiting[0].doing if waiting else ""
    ranks = tuple(sorted(one.rank for one in waiting))
    if own is None:
        return LastSeen(None, "", "", ranks, seconds, where)
    if own.silent > _SILENT_SECONDS:
        return LastSeen(max(one.step for one in statuses), "", "", ranks, seconds, where)
    return LastSeen(own.step, own.doing, own.line, ranks, seconds, where)
