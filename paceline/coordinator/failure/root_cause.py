"""Root-cause analysis of a failed run: separate the first failure from its consequences."""

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
    """Cause of the premature end of a run."""

    kind: str  # stable identifier, such as ``exception``, ``killed`` or ``hang``
    code: int  # exit code of the run
    message: str  # description, which follows the names of the workers, if any
    time: float  # time of the failure, in seconds since 1970
    cause: WorkerReport | None = None  # report of the worker that failed first. None if no worker failed.
    workers: tuple[int, ...] = ()  # numbers of the workers that share the cause
    ranks: tuple[int, ...] = ()  # ranks of these workers, without workers that had no rank
    others: tuple[WorkerReport, ...] = ()  # reports of workers that failed later for other reasons
    # reports of workers that failed because they lost another worker, or were ended
    consequences: tuple[WorkerReport, ...] = ()
    # last known activity of the first failed worker, and the ranks that waited for it
    last_seen: LastSeen = field(default_factory=LastSeen)
    varies: bool = False  # whether the messages of these workers differ in numbers


def diagnose(
    launch: Launch, result: RunResult, coordinator: CoordinatorReport | None = None, seen: int | None = 0
) -> Failure | None:
    """Return the root cause of a failed run, or None if all workers ended well."""
    coordinator = coordinator or CoordinatorReport()
    ended = [one for one in (*result.exits, *coordinator.exits) if one.code not in (0, errors.PREEMPTED)]
    records = coordinator.reports
    reports = {one.worker: report_of(launch, one, seen, records.get(one.worker)) for one in ended}
    spared = {one.worker for one in result.exits if one.tolerated}  # such as a joiner that failed before it joined
    reports = {
        number: one
        for number, one in reports.items()
        if number not in spared or not one.self_reported or one.consequence
    }
    for loss in coordinator.lost:  # other workers may have noticed the loss before the launcher
        if loss.worker in reports:
            report = reports[loss.worker]
            reports[loss.worker] = replace(report, time=min(report.time, loss.time))
    stopped = {one.worker for one in result.exits if one.stopped}
    alone = {number: one for number, one in reports.items() if one.self_reported or number not in stopped}
    causes = _causes([one for one in alone.values() if not one.consequence], coordinator)
    if coordinator.code == errors.PREEMPTED and coordinator.elastic:  # a killed worker does not end an elastic run
        causes = [one for one in causes if one.self_reported]
    if coordinator.code == 0:
        went_on = {loss.worker for loss in coordinator.lost} if coordinator.elastic else set()
        causes = [one for one in causes if one.exit_code and one.worker not in went_on]  # killed workers had finished
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
    """Return the failure of a run in which a worker ended early, or workers failed only because they lost others."""
    early = tuple(one.worker for one in result.exits if one.code == 0 and not one.stopped)
    if reports and early:
        return _by_coordinator(reports, [], replace(coordinator, kind="ended-early", blamed=early))
    if not reports and coordinator.code:  # no remaining machine has a report, for example if all were lost
        return Failure(coordinator.kind or "lost", coordinator.code, coordinator.reason, time.time())
    return _first(list(reports.values()), reports, coordinator, seen) if reports else None


def _causes(reports: list[WorkerReport], coordinator: CoordinatorReport) -> list[WorkerReport]:
    """Return candidates for the root cause, without failures that a replacement mended or another loss explains."""
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
    """Return the last known activity of the failed worker, without activities of earlier steps."""
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
    """Return the failure that only the coordinator can detect: a worker hung, ended early or did not start."""
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
    """Return the failure for a run that was preempted or stopped by a signal, or None."""
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
    """Return reports of workers outside ``named``, except replaced workers and workers killed before they joined."""
    killed = {number for number, one in reports.items() if not one.self_reported and one.time < when}
    gone = coordinator.replaced() | (killed - coordinator.ranks.keys() if coordinator.ranks else set())
    return tuple(one for number, one in sorted(reports.items()) if number not in named and number not in gone)


def _ranks_of(workers: Iterable[int], coordinator: CoordinatorReport) -> tuple[int, ...]:
    ranks = [coordinator.rank_of(worker) for worker in workers]
    return tuple(sorted(rank for rank in ranks if rank is not None))
