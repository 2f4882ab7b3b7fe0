"""Policy for late workers: report them, drop them, or end the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from paceline.coordinator.hang_detection import WorkerStatus, before, deadline, late_workers
from paceline.coordinator.membership import MembershipProtocol
from paceline.coordinator.monitor import RunMonitor
from paceline.errors import DEADLINE_PASSED, StartError, WorkerLost

_FIRST_STEP_SECONDS = 600.0


class LatenessPolicy:
    """Comparison of a generation's heartbeats with deadlines. All methods need the coordinator's lock."""

    def __init__(
        self, membership: MembershipProtocol, monitor: RunMonitor, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._membership, self._monitor, self._clock = membership, monitor, clock
        self._heartbeats: dict[int, tuple[float, WorkerStatus]] = {}
        self._formed_at = self._clock()

    def heartbeat(self, number: int, status: WorkerStatus) -> None:
        self._heartbeats[number] = self._clock(), status

    def forget(self, number: int) -> None:
        """Drop the last heartbeat of a worker, because its activity has ended."""
        self._heartbeats.pop(number, None)

    def reset(self) -> None:
        """Drop all heartbeats, because a generation has formed."""
        self._formed_at = self._clock()
        self._heartbeats.clear()

    def statuses(self, now: float) -> list[WorkerStatus]:
        membership = self._membership
        heard = {
            number: replace(status, rank=membership.rank_of(number) or 0, silent=max(0.0, now - at))
            for number, (at, status) in self._heartbeats.items()
        }
        for rank, number in enumerate(membership.members):
            worker = membership.workers[number]
            if number not in heard and worker.state == "training":  # stopped before its first heartbeat
                steps = worker.progress[0] if worker.progress else 0
                heard[number] = WorkerStatus(rank, steps, "re-forming", False, 0.0, silent=now - self._formed_at)
        return [heard[number] for number in membership.members if number in heard]

    def check(self, now: float) -> None:
        """Act on workers that are late at this time: report them, drop them, or end the run."""
        if self._membership.generation < 0:
            self._check_start(now)
        elif self._monitor.late_workers and self._others_gave_up():
            self._end_hang(now)
        elif overdue := self._membership.overdue(now, self._longest_wait()):
            for number in overdue:
                reason = f"{self._membership.name(number)} did not come back to the others within"
                self._membership.lose(number, f"{reason} {self._longest_wait():.0f} s", now, may_run=True)
        else:
            self._check_heartbeats(self.statuses(now), now)

    def _longest_wait(self) -> float:
        return self._monitor.timeout_seconds or _FIRST_STEP_SECONDS

    def _check_start(self, now: float) -> None:
        if (absent := self._monitor.check_absent(self._membership, now)) is not None:
            numbers, text = absent
            self._membership.end(StartError.exit_code, text, now, kind="not-started", workers=numbers)

    def _others_gave_up(self) -> bool:
        """Return whether all other workers have given up waiting for the late workers, at their own timeout."""
        late = self._monitor.late_workers
        states = {number: self._membership.workers[number].state for number in self._membership.members}
        others = [state for number, state in states.items() if number not in late]
        return (
            self._membership.changing
            and bool(others)
            and all(state == "ready" for state in others)
            and all(states.get(number) == "training" for number in late)
        )

    def _check_heartbeats(self, statuses: list[WorkerStatus], now: float) -> None:
        limit = deadline(statuses, self._monitor.hang_seconds, _FIRST_STEP_SECONDS)
        if self._monitor.timeout_seconds is not None:
            limit = min(limit, before(self._monitor.timeout_seconds))
        late = late_workers(statuses, limit)
        membership, monitor = self._membership, self._monitor
        drops = membership.bounds.drops
        if not late:
            if not membership.changing:
                monitor.clear_late()
            return
        if monitor.late_workers and membership.changing and not drops:
            self._end_hang(now)
            return
        members = membership.members
        monitor.report_late(statuses, members, late, limit)
        if drops:
            for number in [members[one.rank] for one in late]:
                reason = f"{membership.name(number)} was late for more than {limit:.0f} s: {monitor.hang_report}"
                membership.lose(number, reason, now, may_run=True)
        elif membership.changing:
            self._end_hang(now)

    def _end_hang(self, now: float) -> None:
        membership, monitor = self._membership, self._monitor
        if gone := [lost for lost in membership.lost if lost.worker in membership.members]:
            membership.end(WorkerLost.exit_code, gone[-1].reason, now, save=True)
            return
        for number in monitor.late_workers:
            membership.workers[number].state = "gone"  # the other workers save without this one
        late, text = monitor.late_workers, monitor.hang_report
        membership.end(DEADLINE_PASSED, text, now, save=True, kind="hang", workers=late)
