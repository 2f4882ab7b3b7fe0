"""Hang detection: identification of late workers by the status that each worker reports. No sockets, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from paceline.errors import name_ranks

_STEPS = 10
_HEARTBEAT_SECONDS = 1.0


@dataclass(frozen=True)
class WorkerStatus:
    """Status of a worker at its last heartbeat."""

    rank: int  # rank of the worker
    step: int  # current step
    doing: str  # current activity, such as ``in the all-reduce of bucket 2``
    waiting: bool  # whether the worker was waiting for other workers
    since: float  # duration of the activity at the heartbeat, in seconds
    silent: float = 0.0  # time since the heartbeat, in seconds
    line: str = ""  # current line of the user's code, such as ``train.py:41``; empty if unknown
    step_seconds: float | None = None  # median duration of recent steps, in seconds; None before the first step
    busy: bool = False  # whether the activity may take long, such as writing a checkpoint


def deadline(statuses: Sequence[WorkerStatus], given: float | None, first: float) -> float:
    """Return the time after which a worker is late: as configured, otherwise the longer of 30 s and ten steps.

    Args:
        given: setting ``hang_seconds``, if it is set.
        first: deadline in seconds until all workers have completed a step, because they may be compiling.
    """
    known = [one.step_seconds for one in statuses if one.step_seconds is not None]
    if given is not None:
        return given
    if not known or len(known) < len(statuses):
        return first
    return max(30.0, _STEPS * median(known))


def before(timeout: float) -> float:
    """Return the time after which late workers are reported so that two heartbeats come before the others give up."""
    return min(0.9 * timeout, max(0.5 * timeout, timeout - 2 * _HEARTBEAT_SECONDS))


def late_workers(statuses: Sequence[WorkerStatus], limit: float) -> list[WorkerStatus]:
    """Return the late workers, empty if no worker has waited for others for longer than the limit.

    An activity may have ended since the last heartbeat, so the time since then counts only as silence.
    """
    anybody_waits = any(one.waiting and one.since > limit for one in statuses)
    return [one for one in statuses if _is_late(one, limit)] if anybody_waits else []


def _is_late(one: WorkerStatus, limit: float) -> bool:
    return one.silent > limit + _HEARTBEAT_SECONDS or (not one.waiting and not one.busy and one.since > limit)


def describe(statuses: Sequence[WorkerStatus]) -> str:
    """Describe in one sentence which workers wait, where and for how long, and what the other workers do.

    A worker that is silent may have been stopped right after a wait, so its last heartbeat does not say that it waits.
    """
    parts = []
    groups: dict[tuple[bool, int, str, str], list[WorkerStatus]] = {}
    for one in sorted(statuses, key=lambda one: (not _waits(one), one.rank)):
        groups.setdefault((_waits(one), one.step, one.doing, "" if _waits(one) else one.line), []).append(one)
    for (waiting, step, doing, line), group in groups.items():
        who = name_ranks([one.rank for one in group]) + (" have" if len(group) > 1 else " has")
        seconds = max(one.since + one.silent for one in group)
        silent = min(one.silent for one in group)
        at = f", {line}" if line else ""
        if waiting:
            parts.append(f"{who} waited {seconds:.0f} s {doing} at step {step}")
        elif silent > _long_silence(seconds):
            parts.append(
                f"{who} not responded for {silent:.0f} s (stopped, or its machine cannot be reached), last seen "
                f"{doing} at step {step}{at}"
            )
        else:
            parts.append(f"{who} been {doing} at step {step} for {seconds:.0f} s{at}")
    return "; ".join(parts)


def _waits(one: WorkerStatus) -> bool:
    return one.waiting and one.silent <= _long_silence(one.since + one.silent)


def _long_silence(seconds: float) -> float:
    """Return after how many seconds of silence a worker counts as not responding, ``seconds`` into its activity."""
    return max(5.0, seconds / 2)
