"""Who is late: what each worker reports that it is doing, and what follows from it. No sockets, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from paceline.errors import name_ranks

_STEPS = 10
_HEARTBEAT_SECONDS = 1.0


@dataclass(frozen=True)
class WorkerStatus:
    """What one worker was doing at its last heartbeat.

    Attributes:
        rank: of the worker.
        step: the step it was at.
        doing: such as ``in the all-reduce of bucket 2``.
        waiting: whether it waited for other workers.
        since: seconds it had been doing that.
        silent: seconds since the heartbeat.
        line: the line of the user's code it was at, ``train.py:41``; empty if unknown.
        step_seconds: how long its recent steps took; None before the first one.
        busy: whether it does something that may well take long, such as writing a checkpoint.
    """

    rank: int
    step: int
    doing: str
    waiting: bool
    since: float
    silent: float = 0.0
    line: str = ""
    step_seconds: float | None = None
    busy: bool = False


def deadline(statuses: Sequence[WorkerStatus], given: float | None, first: float) -> float:
    """Decide how long the others wait for a worker: as given, else 30 s or ten steps, whichever is longer.

    Args:
        statuses: of all workers.
        given: the setting.
        first: the deadline until all have done a step: they may be compiling.
    """
    known = [one.step_seconds for one in statuses if one.step_seconds is not None]
    if given is not None:
        return given
    if not known or len(known) < len(statuses):
        return first
    return max(30.0, _STEPS * median(known))


def late_workers(statuses: Sequence[WorkerStatus], limit: float) -> list[WorkerStatus]:
    """Find the workers that others have waited for longer than the limit; none if nobody waits that long.

    What a worker did at its last heartbeat may have ended since; only its silence is known to go on.
    """
    anybody_waits = any(one.waiting and one.since > limit for one in statuses)
    return [one for one in statuses if _is_late(one, limit)] if anybody_waits else []


def _is_late(one: WorkerStatus, limit: float) -> bool:
    return one.silent > limit + _HEARTBEAT_SECONDS or (not one.waiting and not one.busy and one.since > limit)


def describe(statuses: Sequence[WorkerStatus]) -> str:
    """Say in one sentence who waits where for how long, and where the others are."""
    parts = []
    groups: dict[tuple[bool, int, str, str], list[WorkerStatus]] = {}
    for one in sorted(statuses, key=lambda one: (not one.waiting, one.rank)):
        groups.setdefault((one.waiting, one.step, one.doing, "" if one.waiting else one.line), []).append(one)
    for (waiting, step, doing, line), group in groups.items():
        who = name_ranks([one.rank for one in group]) + (" have" if len(group) > 1 else " has")
        seconds = max(one.since + one.silent for one in group)
        silent = min(one.silent for one in group)
        at = f", {line}" if line else ""
        if waiting:
            parts.append(f"{who} waited {seconds:.0f} s {doing} at step {step}")
        elif silent > max(5.0, seconds / 2):
            parts.append(
                f"{who} not responded for {silent:.0f} s (stopped, or its machine cannot be reached), last seen "
                f"{doing} at step {step}{at}"
            )
        else:
            parts.append(f"{who} been {doing} at step {step} for {seconds:.0f} s{at}")
    return "; ".join(parts)


def statuses_of(members: Sequence[int], heard: Mapping[int, WorkerStatus]) -> list[WorkerStatus]:
    """The statuses of those members that were heard of."""
    return [heard[number] for number in members if number in heard]
