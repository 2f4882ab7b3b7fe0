"""Who is late: what each worker says it does, and what follows from it. No sockets, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from paceline.errors import name_ranks

_STEPS = 10
_BEAT_SECONDS = 1.0
"""Workers say so often where they are."""


@dataclass(frozen=True)
class Place:
    """What one worker was doing when it was last heard of.

    Attributes:
        rank: of the worker.
        step: the step it was at.
        doing: in words, such as ``in the all-reduce of bucket 2``.
        waits: whether it waited for other workers.
        since: seconds it had been doing that.
        silent: seconds since it was last heard of.
        line: the line of the user's code it was at, ``train.py:41``; empty if unknown.
        step_seconds: how long its steps took lately; none before the first one.
        busy: whether what it does may well take long, such as writing a checkpoint.
    """

    rank: int
    step: int
    doing: str
    waits: bool
    since: float
    silent: float = 0.0
    line: str = ""
    step_seconds: float | None = None
    busy: bool = False


def deadline(places: Sequence[Place], given: float | None, first: float) -> float:
    """How long the others wait for a worker: what was given, else 30 s or ten steps, whichever is longer.

    Args:
        places: of all workers.
        given: the setting.
        first: for workers that have not done a step yet: they may be compiling.
    """
    known = [place.step_seconds for place in places if place.step_seconds is not None]
    if given is not None:
        return given
    if not known or len(known) < len(places):
        return first
    return max(30.0, _STEPS * median(known))


def late(places: Sequence[Place], limit: float) -> list[Place]:
    """The workers that others have waited for longer than the limit; empty if nobody waits so long.

    What a worker did when it was last heard of may have ended since; only that it is silent is known to go on.
    """
    patient = [place for place in places if place.waits and place.since > limit]
    return [place for place in places if _absent(place, limit)] if patient else []


def _absent(place: Place, limit: float) -> bool:
    return place.silent > limit + _BEAT_SECONDS or (not place.waits and not place.busy and place.since > limit)


def sentence(places: Sequence[Place]) -> str:
    """The roll call in one sentence: who waits where for how long, and where the others are."""
    parts = []
    groups: dict[tuple[bool, int, str, str], list[Place]] = {}
    for place in sorted(places, key=lambda one: (not one.waits, one.rank)):
        line = "" if place.waits else place.line
        groups.setdefault((place.waits, place.step, place.doing, line), []).append(place)
    for (waits, step, doing, line), group in groups.items():
        who = name_ranks([place.rank for place in group])
        seconds = max(place.since + place.silent for place in group)
        several = len(group) > 1
        at = f", {line}" if line else ""
        if waits:
            parts.append(f"{who} {'have' if several else 'has'} waited {seconds:.0f} s {doing} at step {step}")
        elif min(place.silent for place in group) > max(5.0, seconds / 2):
            silent = min(place.silent for place in group)
            verb = "have" if several else "has"
            parts.append(
                f"{who} {verb} not answered for {silent:.0f} s (stopped, or its machine cannot be reached), last seen "
                f"{doing} at step {step}{at}"
            )
        else:
            parts.append(f"{who} {'are' if several else 'is'} {doing} at step {step} since {seconds:.0f} s{at}")
    return "; ".join(parts)


def places_of(view: Sequence[int], heard: Mapping[int, Place]) -> list[Place]:
    """The places of the members of a view that were heard of."""
    return [heard[number] for number in view if number in heard]
