"""Durations of a stage's operations: profiled before training, or measured during training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median

from paceline.observe.timeline.pipelines import Pipeline, RecordedOperation
from paceline.schedule.pipeline.clock import Times
from paceline.schedule.pipeline.operations import Kind


def profiled_times(pipeline: Pipeline) -> Times | None:
    """Return the layer times by which the model was cut. Transfers, reductions and updates count as free.

    Each half of a split backward pass counts as half of it, but the whole pass of the first stage as second half. With
    ``recompute`` a backward pass begins with a forward pass.
    """
    if pipeline.times is None:
        return None
    forward = tuple(forward for forward, _ in pipeline.times)
    again = 1.0 if pipeline.settings.recompute else 0.0
    backward = [backward + again * forward for forward, backward in pipeline.times]
    first_parts = [0.0, *(seconds / 2 for seconds in backward[1:])]
    nothing = (0.0,) * len(forward)
    return Times(
        forward=forward,
        input=tuple(first_parts),
        weight=tuple(whole - part for whole, part in zip(backward, first_parts, strict=True)),
        transfer=nothing[1:],
        reduce=nothing,
        update=nothing,
    )


def median_times(done: Iterable[RecordedOperation], stages: int) -> Times:
    """Return the median duration of each measured operation.

    A transfer lasts from the beginning of a send to the end of its receive, if the receiver was already waiting.
    """
    done = list(done)
    seconds: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for _, _, (operation, begin, end) in done:
        seconds[operation.kind, operation.stage].append(end - begin)
    transfers = _transfers(done)

    def of(kind: Kind) -> tuple[float, ...]:
        return tuple(_median(seconds[kind, stage]) for stage in range(stages))

    return Times(
        forward=of(Kind.FORWARD),
        input=of(Kind.INPUT),
        weight=tuple(map(max, of(Kind.BACKWARD), of(Kind.WEIGHT))),  # a stage has only one of these kinds
        transfer=tuple(_median(transfers.get(boundary, [])) for boundary in range(stages - 1)),
        reduce=of(Kind.REDUCE),
        update=of(Kind.UPDATE),
    )


def _transfers(done: list[RecordedOperation]) -> Mapping[int, list[float]]:
    """Return the seconds of transfers that a receiver waited for, by boundary between stages."""
    sent = {
        (step, span.operation.stage, span.operation.peer, span.operation.microbatch): span.begin
        for _, step, span in done
        if span.operation.kind is Kind.SEND
    }
    found: dict[int, list[float]] = defaultdict(list)
    for _, step, (operation, begin, end) in done:
        if operation.kind is Kind.RECEIVE:
            departed = sent.get((step, operation.peer, operation.stage, operation.microbatch))
            if departed is not None and begin <= departed <= end:
                found[min(operation.stage, operation.peer)].append(end - departed)
    return found


def _median(values: list[float]) -> float:
    return median(values) if values else 0.0
