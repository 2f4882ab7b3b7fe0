"""Why a launch ended: which worker failed first, and which only lost it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from paceline import errors
from paceline.launch.base import Launch
from paceline.launch.local import Ended, Outcome

_TAIL_LINES = 30
_TAIL_BYTES = 64 * 1024
_PORT_TAKEN = ("EADDRINUSE", "address already in use")


@dataclass(frozen=True)
class Failure:
    """How one worker failed."""

    rank: int
    exit_code: int
    time: float
    message: str
    details: str = ""  # a traceback, or the last lines it printed
    reported: bool = False  # by the worker itself
    consequence: bool = False  # it only lost another worker
    last_line: str = ""  # that it printed, when it did not report

    def like(self, other: Failure) -> bool:
        """Whether both failed for what looks like the same reason."""
        return (self.message, self.last_line) == (other.message, other.last_line)


@dataclass(frozen=True)
class Diagnosis:
    """The first cause, the ranks that share it, the other failures, and who only lost a worker."""

    cause: Failure
    ranks: tuple[int, ...]
    others: tuple[Failure, ...]
    lost: tuple[int, ...]


def diagnose(launch: Launch, outcome: Outcome, seen: int | None = 0) -> Diagnosis | None:
    """Find the first cause; none when every worker ended well.

    Args:
        launch: what was started.
        outcome: how it ended.
        seen: the rank whose output the user has seen already.
    """
    failures = [_failure(launch, one, seen) for one in outcome.ended if one.code != 0]
    if not failures:
        return None
    stopped = {one.rank for one in outcome.ended if one.stopped}
    causes = [one for one in failures if not one.consequence and (one.reported or one.rank not in stopped)]
    if not causes:
        causes = [_left_early(one) for one in outcome.ended if one.code == 0 and not one.stopped]
    cause = min(causes or failures, key=lambda one: (one.time, one.rank))
    same = [one for one in causes if one.like(cause)] or [cause]
    if not cause.reported:
        cause = next((one for one in same if one.rank == seen), cause)
    ranks = tuple(one.rank for one in same)
    others = tuple(one for one in causes if one.rank not in ranks)
    named = {*ranks, *(one.rank for one in others)}
    return Diagnosis(cause, ranks, others, tuple(one.rank for one in failures if one.rank not in named))


def explain(diagnosis: Diagnosis, workers: int) -> list[str]:
    """The diagnosis as lines for a person: the first cause first."""
    cause, who = diagnosis.cause, name_ranks(diagnosis.ranks, workers)
    lines = [f"{who}: {cause.message}"]
    if cause.details:
        lines += cause.details.rstrip("\n").split("\n")
    lines += [f"{name_ranks((one.rank,))} failed too: {one.message}" for one in diagnosis.others]
    if diagnosis.lost:
        lost = name_ranks(diagnosis.lost)
        why = f"because {_it_lost(diagnosis.lost)} {name_ranks(diagnosis.ranks)}"
        lines.append(f"{lost} stopped {'after that' if cause.consequence else why}")
    return lines


def name_ranks(ranks: Iterable[int], workers: int | None = None) -> str:
    """``rank 1``, ``ranks 0, 2``, or ``all 4 workers``."""
    listed = sorted(ranks)
    if len(listed) == 1:
        return f"rank {listed[0]}"
    return f"all {workers} workers" if len(listed) == workers else f"ranks {', '.join(map(str, listed))}"


def _it_lost(ranks: tuple[int, ...]) -> str:
    return "it lost" if len(ranks) == 1 else "they lost"


def _left_early(one: Ended) -> Failure:
    code = errors.WorkerLost.exit_code
    return Failure(one.rank, code, one.time, "its script ended while the other workers were still training")


def _failure(launch: Launch, ended: Ended, seen: int | None) -> Failure:
    """From the worker's own report, or else from how it ended and what it printed last."""
    try:
        report = json.loads(launch.error(ended.rank).read_text())
        kind, message = str(report["type"]), str(report["message"])
        consequence, when = bool(report["consequence"]), float(report["time"])
        traceback = str(report.get("traceback") or "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return _unreported(launch, ended, seen)
    if hasattr(errors, kind.rpartition(".")[2]):
        traceback = ""
    else:
        message = f"{kind}: {message}"
    message += _port_hint(message)
    return Failure(ended.rank, ended.exit_code, when, message, traceback, True, consequence)


def _unreported(launch: Launch, ended: Ended, seen: int | None) -> Failure:
    tail = _tail(launch, ended.rank)
    details = "the last lines it printed:\n" + "\n".join(tail) if tail and ended.rank != seen else ""
    last_line = tail[-1] if tail else ""
    return Failure(ended.rank, ended.exit_code, ended.time, _ending(ended, tail), details, last_line=last_line)


def _ending(ended: Ended, tail: list[str]) -> str:
    if ended.code >= 0:
        return f"ended with exit code {ended.code}" + _port_hint("\n".join(tail))
    try:
        name = signal.Signals(-ended.code).name
    except ValueError:
        name = "unknown"
    text = f"was ended by signal {-ended.code} ({name})"
    if ended.code == -signal.SIGKILL:
        text += "; the kernel does this when memory runs out: see `dmesg`"
    return text


def _port_hint(text: str) -> str:
    if not any(words.lower() in text.lower() for words in _PORT_TAKEN):
        return ""
    return " (another program took the port meanwhile: start again, or choose one with --port)"


def _tail(launch: Launch, rank: int) -> list[str]:
    try:
        with launch.output(rank).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        return []
