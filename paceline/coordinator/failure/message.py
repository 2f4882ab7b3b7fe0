"""Failure reports: text with the root cause first, and data with stable keys."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.coordinator.failure.coordinator_report import CoordinatorReport
from paceline.coordinator.failure.known_errors import LESS_TO_HOLD
from paceline.coordinator.failure.root_cause import Failure
from paceline.coordinator.failure.worker_report import WorkerReport
from paceline.errors import counted, name_ranks

_LONGEST = 400  # maximum number of characters in the first line
_WORTH_TELLING = 1.0  # shortest wait of other ranks that the message reports, in seconds
_CURES = {
    "killed": "find out who ended it: the scheduler, the limits of the container, `dmesg`, or a user with `kill`",
    "out-of-memory": LESS_TO_HOLD,
    "crashed": "native code crashed: PYTHONFAULTHANDLER=1 prints the line of the script",
    "exit": "the script ended itself (sys.exit or os._exit): see its last output",
    "ended-early": "all workers must take the same batches and make the same calls (evaluate, save, fingerprint): look "
    "for a loop that some ranks leave before the others, or a call behind `if rank == 0`",
    "not-started": "look at what the script does before paceline.start; the others wait for timeout_seconds",
    "lost-connection": "look at that machine and at the network, and start it there again",
}


@dataclass(frozen=True)
class Context:
    """Information about the run for failure messages."""

    workers: int  # number of workers at the start of the run
    output: str  # folder with the output of all workers, as displayed to the user. Empty if it is not kept.
    text: str  # file with the complete message, as displayed to the user
    # newest checkpoint (path or URL), its step, and its time in seconds since 1970. None if none exists.
    checkpoint: tuple[str, int, float] | None
    resume: str  # command that resumes from that checkpoint
    coordinator: CoordinatorReport = field(default_factory=CoordinatorReport)  # report of the coordinator


def short(failure: Failure, context: Context) -> list[str]:
    """Return at most ten lines: what happened to which workers, how the run ended, and what to do."""
    lines = [_first_line(failure, context)]
    if failure.cause is not None:
        lines += [failure.cause.known.paragraph] if failure.cause.known else []
        lines += [f"who: {_who(failure)}", *_when(failure), *_others(failure, context)]
    lines.append(f"done: {_done(failure, context)}")
    lines += _checkpoint(failure, context)
    cure = _cure(failure, context)
    if cure and not (failure.cause and failure.cause.known):
        lines.append(f"fix: {cure}")
    if context.checkpoint is not None:
        lines.append(f"resume with: {context.resume}")
    if context.output:
        lines.append(f"output of every worker: {context.output} (this message: {context.text})")
    return lines


def details(failure: Failure) -> list[str]:
    """Return the traceback of the first failed worker, or its last output lines."""
    return failure.cause.details.rstrip("\n").split("\n") if failure.cause and failure.cause.details else []


def record(failure: Failure, context: Context) -> dict[str, Any]:
    cause, last_seen = failure.cause, failure.last_seen
    exception = cause.exception if cause else None
    found = context.checkpoint
    return {
        "kind": failure.kind,
        "code": failure.code,
        "message": _first_line(failure, context),
        "rank": failure.ranks[0] if failure.ranks else None,
        "ranks": list(failure.ranks),
        "worker": cause.worker if cause else None,
        "host": (cause.host if cause else "") or platform.node(),
        "pid": cause.pid or None if cause else None,
        "signal": cause.signal if cause else None,
        "exit_code": cause.exit_code if cause else None,
        "exception": {"type": exception.type, "message": exception.message, "line": exception.line or None}
        if exception
        else None,
        "traceback": cause.details if cause and exception else None,
        "known_error": cause.known.name if cause and cause.known else None,
        "step": _step(failure, context.coordinator),
        "operation": last_seen.doing or None,
        "line": last_seen.line or (exception.line if exception else "") or None,
        "waited": {"seconds": round(last_seen.seconds, 1), "ranks": list(last_seen.waiting)},
        "done": _done(failure, context),
        "checkpoint": {"path": found[0], "step": found[1]} if found else None,
        "resume": context.resume if found else None,
        "others": [_named_message(one, context.coordinator) for one in failure.others],
        "consequences": [_named_message(one, context.coordinator) for one in failure.consequences],
        "time": failure.time,
    }


def _named_message(report: WorkerReport, coordinator: CoordinatorReport) -> dict[str, Any]:
    return {"rank": coordinator.rank_of(report.worker), "worker": report.worker, "message": report.message}


def _first_line(failure: Failure, context: Context) -> str:
    if failure.cause is None:
        return failure.message
    if failure.kind == "disagreement" or (failure.kind == "hang" and context.coordinator.kind == "hang"):
        line = failure.message
    else:
        line = f"{_name(failure, context)}: {failure.message}"
    exception = failure.cause.exception
    if exception is not None and exception.line:
        line += f" ({exception.line})"
    return line if len(line) <= _LONGEST or failure.kind == "disagreement" else f"{line[:_LONGEST]} ..."


def _name(failure: Failure, context: Context) -> str:
    if len(failure.ranks) < len(failure.workers):
        numbers = ", ".join(map(str, failure.workers))
        return f"worker {numbers}" if len(failure.workers) == 1 else f"workers {numbers}"
    return name_ranks(failure.ranks, context.workers)


def _who(failure: Failure) -> str:
    cause = failure.cause
    assert cause is not None
    process = f"process {cause.pid} " if cause.pid else ""
    where = f"{process}on {cause.host or platform.node()}"
    more = "; the message of the others differs in numbers only" if failure.varies else ""
    return f"worker {cause.worker}, {where}{more}"


def _when(failure: Failure) -> list[str]:
    last_seen = failure.last_seen
    parts: list[str] = []
    if last_seen.step is not None:
        parts.append(f"at step {last_seen.step}")
    if last_seen.doing:
        parts.append(f"last heard {last_seen.doing}" + (f" ({last_seen.line})" if last_seen.line else ""))
    if last_seen.waiting and last_seen.seconds >= _WORTH_TELLING and failure.kind != "hang":
        has = "has" if len(last_seen.waiting) == 1 else "have"
        parts.append(
            f"{name_ranks(last_seen.waiting)} {has} waited {last_seen.seconds:.0f} s {last_seen.where}".rstrip()
        )
    return [f"when: {', '.join(parts)}"] if parts else []


def _others(failure: Failure, context: Context) -> list[str]:
    lines = []
    if failure.others:
        first, more = failure.others[0], len(failure.others) - 1
        text = f"{_named([first], context)} failed too: {first.message}"
        lines.append(text[:_LONGEST] + (f" (and {more} more)" if more else ""))
    if failure.consequences:
        who = _named(failure.consequences, context)
        assert failure.cause is not None
        if failure.cause.consequence:
            lines.append(f"{who} stopped after that")
        else:
            several = len(failure.consequences) > 1
            lost = f"because {'they' if several else 'it'} lost {_name(failure, context)}"
            lines.append(f"{who} stopped {lost}; what {'they report' if several else 'it reports'} follows from that")
    return lines


def _named(reports: list[WorkerReport] | tuple[WorkerReport, ...], context: Context) -> str:
    found = {one.worker: context.coordinator.rank_of(one.worker) for one in reports}
    ranks = [rank for rank in found.values() if rank is not None]
    numbers = [str(worker) for worker, rank in found.items() if rank is None]
    names = [name_ranks(ranks)] if ranks else []
    names += [f"worker{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"] if numbers else []
    return " and ".join(names)


def _done(failure: Failure, context: Context) -> str:
    parts = []
    if context.coordinator.replaced():
        parts.append(lost_in_words(context.coordinator))
    left = context.coordinator.reason.rpartition("; ")[2]
    if context.coordinator.elastic and "of at least" in left:
        parts.append(left)
    if failure.consequences:
        parts.append("the other workers were ended")
    elif failure.cause is not None:
        parts.append("no worker is left")
    else:
        parts.append("all workers have ended")
    if _saved_after(failure, context):
        parts.append("the state was saved first")
    return "; ".join(parts)


def lost_in_words(coordinator: CoordinatorReport) -> str:
    """Return a summary of lost workers, such as ``2 workers were lost on the way; 2 were replaced``."""
    lost = len(coordinator.replaced()) or len(coordinator.lost)
    came = min(lost, coordinator.joined)
    verbs = ["was" if count == 1 else "were" for count in (lost, came)]
    return f"{counted(lost, 'worker')} {verbs[0]} lost on the way; {came} {verbs[1]} replaced"


def _saved_after(failure: Failure, context: Context) -> bool:
    if (found := context.checkpoint) is None:
        return False
    if failure.kind in ("preempted", "stopped"):
        return found[1] >= context.coordinator.step > 0
    return found[2] > failure.time


def _checkpoint(failure: Failure, context: Context) -> list[str]:
    if context.checkpoint is None:
        return ["checkpoint: none"] if failure.last_seen.step or context.coordinator.step else []
    path, step, written = context.checkpoint
    ago = max(0.0, time.time() - written)
    return [f"checkpoint: {shown_path(path)} (step {step}, written {ago:.0f} s ago)"]


def shown_path(path: str | Path) -> str:
    """Return a path relative to the current directory if it is inside this directory, else unchanged."""
    here = Path.cwd()
    if "://" in str(path) or not Path(path).is_relative_to(here):
        return str(path)
    return str(Path(path).relative_to(here))


def _cure(failure: Failure, context: Context) -> str:
    cause, coordinator = failure.cause, context.coordinator
    if failure.kind == "exception" and cause is not None and cause.exception is not None:
        line, notes = cause.exception.line, cause.exception.notes
        cure = f"look at {line}; the traceback is at the end" if line else "the traceback is at the end"
        return f"{notes.rstrip('.')}; {cure}" if notes else cure
    if failure.kind == "hang" and cause is not None:
        place = f"look at {failure.last_seen.line}" if failure.last_seen.line else "see its last output"
        more = "" if coordinator.elastic else "; with --elastic MIN:MAX the others continue without it"
        return f"{place}; hang_seconds and timeout_seconds are the deadlines{more}"
    cure = _CURES.get(failure.kind, "")
    if failure.kind == "killed" and not coordinator.elastic:
        cure += "; with --elastic MIN:MAX the others continue"
    return cure


def _step(failure: Failure, coordinator: CoordinatorReport) -> int | None:
    return failure.last_seen.step if failure.last_seen.step is not None else coordinator.step or None
