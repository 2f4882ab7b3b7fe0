"""Timelines of a pipeline step, as measured and as the simulated clock predicts it.

A step begins when its first microbatch enters the first stage. In a synchronous pipeline it ends with its last
operation. In an asynchronous pipeline it ends when the next step begins and includes all operations until then. The
prediction covers the same interval once the pipeline is full::

    step 1, PipeDream    F3 B1 F4 B2 | F5 B3 F6 B4 | F7 B5 ...      microbatches 5 and 6 enter
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from paceline.observe.timeline.pipelines import Pipeline, RecordedOperation
from paceline.schedule.pipeline.choice import async_pipeline_for, synchronous_schedule
from paceline.schedule.pipeline.clock import Span, Timeline, Times, simulate
from paceline.schedule.pipeline.operations import Kind, Operation, Schedule
from paceline.schedule.pipeline.pipedream import async_schedule

_FILLED = 2  # minimum number of batches, and of rounds of all workers, that enter before the predicted batch


def measured(pipeline: Pipeline, done: Sequence[RecordedOperation], step: int) -> Timeline:
    """Return the measured timeline of a step. ``done`` may include operations of other steps."""
    entered = _entered(done, step)
    assert entered, "a step that is recorded in full has a first microbatch"
    end = math.inf
    if pipeline.asynchronous:
        following = _entered(done, step + 1)
        end = following[0].span.begin if following else math.inf
    else:
        done = [one for one in done if one.step == step]
    spans: list[list[Span]] = [[] for _ in range(pipeline.workers)]
    for rank, _, span in done:
        spans[rank].append(span)
    return _window(spans, entered[0].span.begin, end)


def schedule_of(pipeline: Pipeline, done: Sequence[RecordedOperation], step: int) -> Schedule:
    """Return the schedule of a step. For an asynchronous pipeline, it begins with the pipeline's first microbatch."""
    if pipeline.asynchronous:
        cut = async_pipeline_for(pipeline.settings, pipeline.workers, pipeline.microbatches)
        return async_schedule(cut, pipeline.microbatches * (_ahead(pipeline) + 2))
    return synchronous_schedule(pipeline.settings, pipeline.workers, len(_entered(done, step)))


def layout_of(pipeline: Pipeline) -> Schedule:
    """Return the schedule of a full batch, in which each worker has a microbatch in each stage that it holds."""
    if pipeline.asynchronous:
        cut = async_pipeline_for(pipeline.settings, pipeline.workers, pipeline.microbatches)
        return async_schedule(cut, max(pipeline.microbatches, *cut.replicas))
    return synchronous_schedule(pipeline.settings, pipeline.workers, pipeline.microbatches)


def predicted(
    pipeline: Pipeline, done: Sequence[RecordedOperation], step: int, schedule: Schedule, times: Times
) -> Timeline:
    """Return the step's timeline predicted by the clock. From ``done``, only microbatches and versions are used."""
    timeline = simulate(schedule, times)
    if not pipeline.asynchronous:
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
    """Return the forward passes of a step in the first stage."""
    return [
        one
        for one in done
        if one.step == step and one.span.operation.kind is Kind.FORWARD and one.span.operation.stage == 0
    ]


def _window(workers: Iterable[Iterable[Span]], begin: float, end: float) -> Timeline:
    """Clip spans to an interval. Times in the result are relative to the beginning of the interval."""
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
