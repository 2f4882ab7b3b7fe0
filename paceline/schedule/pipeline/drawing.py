"""Schedules and timelines as text, with one line per worker.

A cell is the letter of an operation and its microbatch: ``F3``, or ``F1.3`` for stage 1 if workers hold several stages.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.schedule.pipeline.clock import TRANSFERS, Span, Timeline
from paceline.schedule.pipeline.operations import Kind, Operation, Schedule


def listing(schedule: Schedule, transfers: bool = True) -> str:
    """Return the operations of each worker as text.

    ``>`` marks a value for the next stage, ``<`` a gradient for the previous stage: ``s3>`` sends, ``r3<`` receives. A
    weight version other than 0 follows a colon.

    Args:
        transfers: whether to include sends and receives.

    >>> from paceline.schedule.pipeline.synchronous import one_forward_one_backward
    >>> print(listing(one_forward_one_backward(2, 2)))
    0  F0 s0> F1 s1> r0< B0 r1< B1 U:1
    1  r0> F0 B0 s0< r1> F1 B1 s1< U:1
    """
    several = _several(schedule.workers)
    lines = []
    for worker, operations in enumerate(schedule.workers):
        drawn = [one for one in operations if transfers or one.kind not in TRANSFERS]
        cells = [_cell(one, several) + (f":{one.version}" if one.version else "") for one in drawn]
        lines.append(f"{worker}  {' '.join(cells)}".rstrip())
    return "\n".join(lines)


def draw(timeline: Timeline, column: float | None = None) -> str:
    """Draw the operations of the workers over time, which runs to the right. Gaps are idle time.

    Args:
        column: seconds per cell. Defaults to the shortest forward or backward pass. Timelines drawn with the same value
            can be compared line by line.

    >>> from paceline.schedule.pipeline.clock import Times, simulate
    >>> from paceline.schedule.pipeline.synchronous import one_forward_one_backward
    >>> print(draw(simulate(one_forward_one_backward(3, 3), Times.equal(3))))
    0  F0 F1 F2             B0---    B1---    B2---
    1     F0 F1       B0--- F2 B1---    B2---
    2        F0 B0--- F1 B1--- F2 B2---
    """
    several = _several([span.operation for span in spans] for spans in timeline.workers)
    drawn = [[span for span in spans if span.operation.kind not in TRANSFERS] for spans in timeline.workers]
    cells = [span for spans in drawn for span in spans if span.operation.microbatch >= 0 and span.end > span.begin]
    width = max((len(_cell(span.operation, several)) for span in cells), default=1) + 1
    seconds = column or min((span.end - span.begin for span in cells), default=1.0)
    lines = [_line(spans, width / seconds, several) for spans in drawn]
    return "\n".join(f"{worker}  {line}".rstrip() for worker, line in enumerate(lines))


def _line(spans: list[Span], scale: float, several: bool) -> str:
    """Return the line of a worker, with ``scale`` characters per second and without operations of no duration."""
    line = ""
    for operation, begin, end in spans:
        if end > begin:
            length = max(1, round(end * scale) - round(begin * scale))
            cell = _cell(operation, several)[: max(1, length - 1)]
            line = line[: round(begin * scale)].ljust(round(begin * scale)) + cell.ljust(length - 1, "-").ljust(length)
    return line


def _several(workers: Iterable[Iterable[Operation]]) -> bool:
    """Return whether any worker holds several stages."""
    return any(len({operation.stage for operation in operations}) > 1 for operations in workers)


def _cell(operation: Operation, several: bool) -> str:
    kind, stage, microbatch, _, peer = operation
    numbers = [str(stage)] if several else []
    if microbatch >= 0:
        numbers.append(str(microbatch))
    up = (peer > stage) == (kind == Kind.SEND)
    arrow = (">" if up else "<") if kind in TRANSFERS else ""
    return kind + ".".join(numbers) + arrow
