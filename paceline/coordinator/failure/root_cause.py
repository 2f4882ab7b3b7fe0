"""Why a run ended: which worker failed first, and which only lost it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from paceline import errors
from paceline.coordinator.failure.coordinator_report import CoordinatorReport, LastSeen
from paceline.coordinator.failure.worker_report import WorkerReport, report_of, signal_name
from paceline.errors import name_ranks
from paceline.launchers.base import Launch, RunResult

_NOTICES = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Failure:
    """Why a run ended before its time.

    Attributes:
        kind: a word that stays the same, such as ``exception``, ``killed`` or ``hang``.
        code: the exit code of the run.
        message: what happened, to follow the names of the workers, if there are any.
        time: when, in seconds since 1970.
        cause: how the first worker failed; none if none did.
        workers: the numbers of those that share the cause.
        ranks: and their ranks, as far as they had one.
        varies: whether their messages differ in numbers.
        others: that failed of themselves, later.
        consequences: that only lost another worker, or were ended.
        last_seen: where the first worker was, and who waited for it.
    """

    kind: str
    code: int
    message: str
    time: float
    cause: WorkerReport | None = None
    workers: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    others: tuple[WorkerReport, ...] = ()
    consequences: tuple[WorkerReport, ...] = ()
    last_seen: LastSeen = field(default_factory=LastSeen)
    varies: bool = False


def diagnose(
    launch: Launch, result: RunResult, coordinator: CoordinatorReport | None = None, seen: int | None = 0
) -> Failure | None:
    """Find the first cause; none when every worker ended well.

    Args:
        launch: what was started.
        result: how its processes ended.
        coordinator: what the coordinator knows, if there was one.
        seen: the worker whose output was shown.
    """
    coordinator = coordinator or CoordinatorReport()
    ended = [one for one in (*result.exits, *coordinator.exits) if one.code not in (0, errors.PREEMPTED)]
    records = coordinator.reports
    reports = {one.worker: report_of(launch, one, seen, records.get(one.worker)) for one in ended}
    spared = {one.worker for one in result.exits if one.tolerated}  # such as one that came to join, and failed first
    reports = {
        number: one
        for number, one in reports.items()
        if number not in spared or not one.self_reported or one.consequence
    }
    for loss in coordinator.lost:  # the other workers may have noticed it before the launcher
        if loss.worker in reports:
            report = reports[loss.worker]
            reports[loss.worker] = replace(report, time=min(report.time, loss.time))
    stopped = {one.worker for one in result.exits if one.stopped}
    alone = {number: one for number, one in reports.items() if one.self_reported or number not in stopped}
    causes = _causes([one for one in alone.values() if not one.consequence], coordinator)
    if coordinator.code == errors.PREEMPTED and coordinator.elastic:  # who was killed would have been replaced
        causes = [one for one in causes if one.self_reported]
    if coordinator.code == 0:
        went_on = {loss.worker for loss in coordinator.lost} if coordinator.elastic else set()
        causes = [one for one in causes if one.exit_code and one.worker not in went_on]  # who was killed was at the end
    if causes and coordinator.kind in ("", "ended-early"):
        return _first(causes, reports, coordinator, seen)
    if coordinator.blamed and coordinator.kind:
        return _by_coordinator(reports, causes, coordinator)
    if coordinator.code == 0 and result.signal is None:
        return None
    return _interrupted(result, coordinator) or _of_consequences(result, reports, coordinator, seen)


def _of_consequences(
    result: RunResult, reports: dict[int, WorkerReport], coordinator: CoordinatorReport, seen: int | None
) -> Failure | None:
    """Find the cause when no worker failed on its own: one ended early, or else the first that lost another worker."""
    early = tuple(one.worker for one in result.exits if one.code == 0 and not one.stopped)
    if reports and early:
        return _by_coordinator(reports, [], replace(coordinator, kind="ended-early", blamed=early))
    if not reports and coordinator.code:  # no machine that is left knows of a worker, as when all are gone
        return Failure(coordinator.kind or "lost", coordinator.code, coordinator.reason, time.time())
    return _first(list(reports.values()), reports, coordinator, seen) if reports else None


def _causes(reports: list[WorkerReport], coordinator: CoordinatorReport) -> list[WorkerReport]:
    """Those that may have been first: without what went well again, and without what the loss of another explains."""
    replaced = coordinator.replaced()
    reports = [one for one in reports if one.worker not in replaced or (one.self_reported and not one.caused_by_loss())]
    own = [one for one in reports if not one.caused_by_loss()]
    reported = [one for one in own if one.self_reported]
    return (reported if coordinator.elastic else []) or own or reports


def _first(
    causes: list[WorkerReport], reports: dict[int, WorkerReport], coordinator: CoordinatorReport, seen: int | None
) -> Failure:
    cause = min(causes, key=lambda one: (one.time, one.worker))
    same = [one for one in causes if one.same_cause(cause)] if not cause.consequence else [cause]
    if not cause.self_reported:
        cause = next((one for one in same if one.worker == seen), cause)
    workers = tuple(sorted(one.worker for one in same))
    named = {*workers, *(one.worker for one in causes)} if not cause.consequence else {*workers}
    return Failure(
        cause.kind,
        cause.code,
        cause.message,
        cause.time,
        cause,
        workers,
        _ranks_of(workers, coordinator),
        tuple(one for one in causes if one.worker not in workers and one.worker in named and not cause.consequence),
        _rest(reports, named, coordinator, cause.time),
        _last_seen_of(cause, coordinator),
        len({one.message for one in same}) > 1,
    )


def _last_seen_of(cause: WorkerReport, coordinator: CoordinatorReport) -> LastSeen:
    """Where it was; what it was heard to do in an earlier step says nothing any more."""
    found = coordinator.last_seen.get(cause.worker, LastSeen())
    step = cause.step if cause.step is not None else coordinator.step
    if found.step is None or found.step < step:
        known = cause.step is not None or step > 0
        return replace(found, step=step if known else None, doing="", line="")
    return found


_BY_COORDINATOR = {
    "hang": ("did not come", errors.DEADLINE_PASSED),
    "ended-early": ("the script ended while the other workers were still training", 1),
    "not-started": ("did not reach paceline.start", errors.StartError.exit_code),
}


def _by_coordinator(
    reports: dict[int, WorkerReport], causes: list[WorkerReport], coordinator: CoordinatorReport
) -> Failure:
    """Blame whom only the coordinator can: a worker was late, or ended early."""
    message, code = _BY_COORDINATOR[coordinator.kind]
    workers = coordinator.blamed
    when = min((one.time for one in reports.values()), default=time.time())
    last_seen = coordinator.last_seen.get(workers[0], LastSeen())
    if coordinator.kind == "hang" and coordinator.reason:
        message = f"a hang: {coordinator.reason}"
    if coordinator.kind == "not-started" and last_seen.seconds:
        message += f" in {last_seen.seconds:.0f} s"
    pid, host = coordinator.processes.get(workers[0], (0, ""))
    cause = WorkerReport(workers[0], coordinator.kind, message, when, code, host=host, pid=pid, step=last_seen.step)
    others = tuple(one for one in causes if one.worker not in workers)
    named = {*workers, *(one.worker for one in others)}
    rest = _rest(reports, named, coordinator, when)
    return Failure(
        coordinator.kind, code, message, when, cause, workers, _ranks_of(workers, coordinator), others, rest, last_seen
    )


def _interrupted(result: RunResult, coordinator: CoordinatorReport) -> Failure | None:
    """Somebody ended the run, in order or not."""
    number = result.signal
    by = f" by {signal_name(number)}" if number is not None else ""
    preempted = coordinator.code == errors.PREEMPTED or any(one.code == errors.PREEMPTED for one in result.exits)
    if preempted and (number is None or number in _NOTICES):
        at = f" at step {coordinator.step}" if coordinator.step else " before its first step"
        workers = coordinator.leaving if number is None else ()
        ranks = _ranks_of(workers, coordinator)
        asked = f": {name_ranks(ranks)} was asked to end" if ranks else ""
        return Failure("preempted", errors.PREEMPTED, f"preempted{by}{at}{asked}", time.time())
    if number is not None:
        return Failure("stopped", 128 + number, f"stopped{by}", time.time())
    return None


def _rest(
    reports: dict[int, WorkerReport], named: set[int], coordinator: CoordinatorReport, when: float
) -> tuple[WorkerReport, ...]:
    """Whom the failure at this time has ended: not those that were replaced, or killed before they had joined."""
    killed = {number for number, one in reports.items() if not one.self_reported and one.time < when}
    gone = coordinator.replaced() | (killed - coordinator.ranks.keys() if coordinator.ranks else set())
    return tuple(one for number, one in sorted(reports.items()) if number not in named and number not in gone)


def _ranks_of(workers: Iterable[int], coordinator: CoordinatorReport) -> tuple[int, ...]:
    ranks = [coordinator.rank_of(worker) for worker in workers]
    return tuple(sorted(rank for rank in ranks if rank is not None))
