"""A step of a pipeline as it was measured, and as the simulated clock predicts it.

A step begins when its first microbatch enters the first stage. In a pipeline that runs empty it ends with its last
operation. In one that does not it ends when the next step begins, and has all that the workers do until then; the
prediction is that of the same moments when the pipeline has long been full::

    step 1, PipeDream    F3 B1 F4 B2 | F5 B3 F6 B4 | F7 B5 ...      microbatches 5 and 6 enter
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from paceline.observe.pipelines import Pipeline, RecordedOperation
from paceline.schedule.choice import async_pipeline_for, synchronous_schedule
from paceline.schedule.clock import Span, Timeline, Times, simulate
from paceline.schedule.operations import Kind, Operation, Schedule
from paceline.schedule.pipedream import async_schedule

_FILLED = 2
"""So many batches at least have entered before the one that is predicted, and so many rounds of all workers."""


def measured(pipeline: Pipeline, done: Sequence[RecordedOperation], step: int) -> Timeline:
    """A step as it was; ``done`` may hold operations of other steps as well."""
    entered = _entered(done, step)
    assert entered, "a step that is recorded in full has a first microbatch"
    end = math.inf
    if pipeline.streamed:
        following = _entered(done, step + 1)
        end = following[0].span.begin if following else math.inf
    else:
        done = [one for one in done if one.step == step]
    spans: list[list[Span]] = [[] for _ in range(pipeline.workers)]
    for rank, _, span in done:
        spans[rank].append(span)
    return _window(spans, entered[0].span.begin, end)


def schedule_of(pipeline: Pipeline, done: Sequence[RecordedOperation], step: int) -> Schedule:
    """What the workers do in a step; of a pipeline that does not run empty, from its first microbatch on."""
    if pipeline.streamed:
        stream = async_pipeline_for(pipeline.settings, pipeline.workers, pipeline.microbatches)
        return async_schedule(stream, pipeline.microbatches * (_ahead(pipeline) + 2))
    return synchronous_schedule(pipeline.settings, pipeline.workers, len(_entered(done, step)))


def layout_of(pipeline: Pipeline) -> Schedule:
    """What the workers do in a whole batch: there each of them has a microbatch in each stage that it holds."""
    if pipeline.streamed:
        stream = async_pipeline_for(pipeline.settings, pipeline.workers, pipeline.microbatches)
        return async_schedule(stream, max(pipeline.microbatches, *stream.replicas))
    return synchronous_schedule(pipeline.settings, pipeline.workers, pipeline.microbatches)


def predicted(
    pipeline: Pipeline, done: Sequence[RecordedOperation], step: int, schedule: Schedule, times: Times
) -> Timeline:
    """The same step by the clock; of ``done`` only the number of microbatches and the version count."""
    timeline = simulate(schedule, times)
    if not pipeline.streamed:
        return timeline
    entered, size = _entered(done, step), pipeline.microbatches
    first = _ahead(pipeline) * size
    enters = {
        span.operation.microbatch: span
        for spans in timeline.workers
        for span in spans
        if span.operation.kind is Kind.FORWARD and span.operation.stage == 0
    }
    later = entered[0].span.operation.version - enters[first].operation.version

    def renumbered(one: Operation) -> Operation:
        microbatch = one.microbatch % size if one.microbatch >= 0 else one.microbatch
        return one._replace(microbatch=microbatch, version=one.version + (later if one.peer < 0 else 0))

    spans = [[Span(renumbered(one), begin, end) for one, begin, end in spans] for spans in timeline.workers]
    return _window(spans, enters[first].begin, enters[first + len(entered)].begin)


def _ahead(pipeline: Pipeline) -> int:
    return _FILLED + math.ceil(_FILLED * pipeline.workers / pipeline.microbatches)


def _entered(done: Iterable[RecordedOperation], step: int) -> list[RecordedOperation]:
    """The forward passes of the first stage."""
    return [
        one
        for one in done
        if one.step == step and one.span.operation.kind is Kind.FORWARD and one.span.operation.stage == 0
    ]


def _window(workers: Iterable[Iterable[Span]], begin: float, end: float) -> Timeline:
    """What is done between two moments, counted from the first of them."""
    return Timeline(
        tuple(
            tuple(
                Span(one, max(left, begin) - begin, min(right, end) - begin)
                for one, left, right in spans
                if left < end and right > begin
            )
            for spans in workers
        )
    )
