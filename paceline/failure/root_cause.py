"""Why a run ended: which worker failed first, and which only lost it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from paceline import errors
from paceline.errors import name_ranks
from paceline.failure.coordinator_report import Account, Scene
from paceline.failure.worker_report import Report, report_of, signal_name
from paceline.launch.base import Launch
from paceline.launch.local import RunResult

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
        others: that failed of themselves, later.
        consequences: that only lost another worker, or were ended.
        scene: where the first worker was, and who waited for it.
    """

    kind: str
    code: int
    message: str
    time: float
    cause: Report | None = None
    workers: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    others: tuple[Report, ...] = ()
    consequences: tuple[Report, ...] = ()
    scene: Scene = field(default_factory=Scene)


def diagnose(
    launch: Launch, outcome: RunResult, account: Account | None = None, seen: int | None = 0
) -> Failure | None:
    """Find the first cause; none when every worker ended well.

    Args:
        launch: what was started.
        outcome: how its processes ended.
        account: what the roster knows, if there was one.
        seen: the worker whose output the user has seen already.
    """
    account = account or Account()
    ended = [one for one in (*outcome.ended, *account.ended) if one.code not in (0, errors.PREEMPTED)]
    records = account.reports
    reports = {one.rank: report_of(launch, one, seen, records.get(one.rank)) for one in ended}
    spared = {one.rank for one in outcome.ended if one.forgiven}  # such as one that came to join, and failed first
    reports = {
        number: one for number, one in reports.items() if number not in spared or not one.told or one.consequence
    }
    for loss in account.lost:  # the other workers may have noticed it before the launcher
        if loss.worker in reports:
            report = reports[loss.worker]
            reports[loss.worker] = replace(report, time=min(report.time, loss.time))
    stopped = {one.rank for one in outcome.ended if one.stopped}
    alone = {number: one for number, one in reports.items() if one.told or number not in stopped}
    causes = _causes([one for one in alone.values() if not one.consequence], account)
    if account.code == 0:
        went_on = {loss.worker for loss in account.lost} if account.elastic else set()
        causes = [one for one in causes if one.exit_code and one.worker not in went_on]  # who was killed was at the end
    if causes and account.kind in ("", "ended-early"):
        return _first(causes, reports, account, seen)
    if account.culprits and account.kind:
        return _by_roster(reports, causes, account)
    if account.code == 0 and outcome.signal is None:
        return None
    return _interrupted(outcome, account) or _of_consequences(outcome, reports, account, seen)


def _of_consequences(
    outcome: RunResult, reports: dict[int, Report], account: Account, seen: int | None
) -> Failure | None:
    """Nobody failed of itself: somebody left early, or else the first of those that lost another one stands for it."""
    early = tuple(one.rank for one in outcome.ended if one.code == 0 and not one.stopped)
    if reports and early:
        return _by_roster(reports, [], replace(account, kind="ended-early", culprits=early))
    return _first(list(reports.values()), reports, account, seen) if reports else None


def _causes(reports: list[Report], account: Account) -> list[Report]:
    """Those that may have been first: without what went well again, and without what the loss of another explains."""
    replaced = account.replaced()
    reports = [one for one in reports if one.worker not in replaced or (one.told and not one.cut_off())]
    own = [one for one in reports if not one.cut_off()]
    told = [one for one in own if one.told]
    return (told if account.elastic else []) or own or reports


def _first(causes: list[Report], reports: dict[int, Report], account: Account, seen: int | None) -> Failure:
    cause = min(causes, key=lambda one: (one.time, one.worker))
    same = [one for one in causes if one.like(cause)] if not cause.consequence else [cause]
    if not cause.told:
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
        _ranks_of(workers, account),
        tuple(one for one in causes if one.worker not in workers and one.worker in named and not cause.consequence),
        _rest(reports, named, account),
        _scene_of(cause, account),
    )


def _scene_of(cause: Report, account: Account) -> Scene:
    """Where it was; what it was heard to do in an earlier step says nothing any more."""
    found = account.scenes.get(cause.worker, Scene())
    step = cause.step if cause.step is not None else account.step
    if found.step is None or found.step < step:
        known = cause.step is not None or step > 0
        return replace(found, step=step if known else None, doing="", line="")
    return found


_BY_ROSTER = {
    "hang": ("did not come", errors.DEADLINE_PASSED),
    "ended-early": ("the script ended while the other workers were still training", 1),
    "not-started": ("did not reach paceline.start", errors.StartError.exit_code),
}


def _by_roster(reports: dict[int, Report], causes: list[Report], account: Account) -> Failure:
    """What only the roster can know: somebody was late, or left."""
    message, code = _BY_ROSTER[account.kind]
    workers = account.culprits
    when = min((one.time for one in reports.values()), default=time.time())
    scene = account.scenes.get(workers[0], Scene())
    if account.kind == "hang" and account.reason:
        message = f"a hang: {account.reason}"
    if account.kind == "not-started" and scene.seconds:
        message += f" in {scene.seconds:.0f} s"
    pid, host = account.homes.get(workers[0], (0, ""))
    cause = Report(workers[0], account.kind, message, when, code, host=host, pid=pid, step=scene.step)
    others = tuple(one for one in causes if one.worker not in workers)
    named = {*workers, *(one.worker for one in others)}
    rest = _rest(reports, named, account)
    return Failure(account.kind, code, message, when, cause, workers, _ranks_of(workers, account), others, rest, scene)


def _interrupted(outcome: RunResult, account: Account) -> Failure | None:
    """Somebody ended the run, in order or not."""
    number = outcome.signal
    by = f" by {signal_name(number)}" if number is not None else ""
    preempted = account.code == errors.PREEMPTED or any(one.code == errors.PREEMPTED for one in outcome.ended)
    if preempted and (number is None or number in _NOTICES):
        at = f" at step {account.step}" if account.step else " before its first step"
        workers = account.leaving if number is None else ()
        ranks = _ranks_of(workers, account)
        asked = f": {name_ranks(ranks)} was asked to end" if ranks else ""
        return Failure("preempted", errors.PREEMPTED, f"preempted{by}{at}{asked}", time.time())
    if number is not None:
        return Failure("stopped", 128 + number, f"stopped{by}", time.time())
    return None


def _rest(reports: dict[int, Report], named: set[int], account: Account) -> tuple[Report, ...]:
    gone = account.replaced()
    return tuple(one for number, one in sorted(reports.items()) if number not in named and number not in gone)


def _ranks_of(workers: Iterable[int], account: Account) -> tuple[int, ...]:
    ranks = [account.rank_of(worker) for worker in workers]
    return tuple(sorted(rank for rank in ranks if rank is not None))
