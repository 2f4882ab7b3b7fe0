"""What the workers did, from their events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.schedule.clock import Span, Timeline
from paceline.schedule.operations import Kind, Operation

KINDS = {kind.name.lower(): kind for kind in Kind}


def span_of(event: dict[str, Any]) -> Span | None:
    """The operation that an event is about, in seconds since 1970; none if it is about something else."""
    kind = KINDS.get(event["event"])
    if kind is None or "stage" not in event:
        return None
    operation = Operation(
        kind, event["stage"], event.get("microbatch", -1), event.get("version", 0), event.get("peer", -1)
    )
    return Span(operation, event["time"] - event["seconds"], event["time"])


def timeline_of(events: Sequence[dict[str, Any]], workers: int, session: tuple[float, float], step: int) -> Timeline:
    """A step of a session that began and ended at these times."""
    found: list[list[Span]] = [[] for _ in range(workers)]
    for event in events:
        span = span_of(event)
        if span is not None and event.get("step") == step and session[0] <= span.begin and span.end <= session[1]:
            found[event["rank"]].append(span)
    first = min((span.begin for spans in found for span in spans), default=0.0)
    return Timeline(tuple(tuple(Span(one, begin - first, end - first) for one, begin, end in spans) for spans in found))
