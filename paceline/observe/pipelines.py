"""Pipelines in the records of a run: how the model was cut, and the operations that the workers did.

Rank 0 records each ``cut``. What follows belongs to it, up to the next one: of another session, after a resume, of
other workers when one was lost, or because another cut is faster.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paceline.errors import InputError
from paceline.observe.records import Record, number
from paceline.schedule.choice import ASYNC_SCHEDULES, shape_of
from paceline.schedule.clock import Span
from paceline.schedule.operations import Kind, Operation
from paceline.settings import PipelineSettings

KINDS = {kind.name.lower(): kind for kind in Kind}
"""The operations by the names of their events."""


@dataclass(frozen=True)
class Pipeline:
    """A model cut into stages, from this cut to the next one.

    Attributes:
        generation: of its workers.
        begin: when it was cut, in seconds since 1970.
        end: when it was cut the next time.
        again: cut in the middle of a loop, because another cut is faster.
        device: the type of the devices that compute; empty if that is not known.
        workers: how many.
        microbatches: of a whole batch.
        settings: of the pipeline.
        stages: the names of the layers of each.
        times: seconds that the layers of each stage were measured to take for a microbatch before training, forward
            and backward; none if they were not measured.
        steps: those that all workers have finished, and the seconds of the slowest one, with the update and the data.
    """

    generation: int
    begin: float
    end: float
    again: bool
    device: str
    workers: int
    microbatches: int
    settings: PipelineSettings
    stages: tuple[tuple[str, ...], ...]
    times: tuple[tuple[float, float], ...] | None
    steps: dict[int, float] = field(default_factory=dict)

    @property
    def streamed(self) -> bool:
        """Whether it does not run empty at the end of a step."""
        return self.settings.schedule in ASYNC_SCHEDULES

    @property
    def ended(self) -> list[int]:
        """The steps that have an end; in a pipeline that does not run empty that is where the next one begins."""
        return sorted(step for step in self.steps if not self.streamed or step + 1 in self.steps)


class RecordedOperation(NamedTuple):
    """An operation that a worker did.

    Attributes:
        rank: of the worker.
        step: of the microbatch; none if it is about no microbatch.
        span: the operation, and when, in seconds since 1970. The microbatch is numbered within its step.
    """

    rank: int
    step: int | None
    span: Span


class _Cut(NamedTuple):
    """From when on what follows belongs to a pipeline; none if its record cannot be read."""

    generation: int
    begin: float
    again: bool
    pipeline: Pipeline | None


class _Finished(NamedTuple):
    """A worker has finished a step."""

    step: int
    rank: int
    generation: int
    end: float
    seconds: float


def pipelines_of(records: Iterable[Record]) -> list[Pipeline]:
    """The pipelines in the records ``cut`` and ``step`` of a run, the oldest first.

    Raises:
        InputError: the model was cut, but all records of that are those of another version of Paceline.
    """
    cuts: list[Record] = []
    finished: list[_Finished] = []
    for record in records:
        if record["event"] == "cut":
            cuts.append(record)
        elif record["event"] == "step" and (one := _finished(record)) is not None:
            finished.append(one)
    found = _cuts(cuts)
    if found and all(cut.pipeline is None for cut in found):
        raise InputError(
            "The records of how the model was cut are those of another version of Paceline, which this one cannot "
            "draw. Some new steps are enough: go on with the run (paceline run --set resume=auto ...), or train anew."
        )
    seconds: dict[int, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for one in finished:
        place = _place_of(found, one)
        if place is not None:
            seconds[place][one.step][one.rank] = one.seconds
    return [
        replace(
            cut.pipeline,
            steps={step: max(told.values()) for step, told in seconds[place].items() if len(told) == workers},
        )
        for place, cut in enumerate(found)
        if cut.pipeline is not None and (workers := cut.pipeline.workers)
    ]


def _finished(record: Record) -> _Finished | None:
    step, seconds = record.get("step"), number(record.get("seconds"))
    if type(step) is not int or seconds is None:
        return None
    return _Finished(step, record["rank"], record["generation"], float(record["time"]), seconds)


def _cuts(records: Iterable[Record]) -> list[_Cut]:
    ordered = sorted(records, key=lambda one: float(one["time"]))
    ends = [*(float(one["time"]) for one in ordered[1:]), math.inf]
    return [
        _Cut(one["generation"], float(one["time"]), one.get("again") is True, _pipeline(one, end))
        for one, end in zip(ordered, ends, strict=False)
    ]


def _pipeline(cut: Record, end: float) -> Pipeline | None:
    """As a record says; none if it is not one of this version."""
    try:
        times = cut["times"]
        found = Pipeline(
            generation=cut["generation"],
            begin=float(cut["time"]),
            end=end,
            again=cut["again"],
            device=str(cut.get("device", "")),
            workers=cut["workers"],
            microbatches=cut["microbatches"],
            settings=PipelineSettings.model_validate(cut["pipeline"]),
            stages=tuple(tuple(map(str, layers)) for layers in cut["stages"]),
            times=None if times is None else tuple((float(forward), float(backward)) for forward, backward in times),
        )
        fits = {len(found.stages), len(found.times or found.stages)} == {shape_of(found.settings, found.workers).stages}
    except (KeyError, TypeError, ValueError):
        return None
    return found if fits and all(found.stages) else None


def _place_of(cuts: Sequence[_Cut], step: _Finished) -> int | None:
    """The cut that a step was done with: a new one in the middle of a loop comes before the step's own record."""
    for place in range(len(cuts) - 1, -1, -1):
        since = step.end - step.seconds if cuts[place].again else step.end
        if cuts[place].generation == step.generation and cuts[place].begin <= since:
            return place
    return None


def span_of(record: Record) -> Span | None:
    """The operation that a record is about, and when, in seconds since 1970; none if it is not about a whole one.

    >>> record = {"time": 7.5, "event": "forward", "stage": 1, "microbatch": 3, "version": 0, "seconds": 2.5}
    >>> span_of(record) == Span(Operation(Kind.FORWARD, 1, 3), 5.0, 7.5)
    True
    """
    kind = KINDS.get(record["event"])
    end, seconds = number(record.get("time")), number(record.get("seconds"))
    stage, microbatch = record.get("stage"), record.get("microbatch", -1)
    version, peer = record.get("version", 0), record.get("peer", -1)
    if kind is None or end is None or seconds is None or {*map(type, (stage, microbatch, version, peer))} != {int}:
        return None
    return Span(Operation(kind, stage, microbatch, version, peer), end - seconds, end)  # type: ignore[arg-type]


def operations_of(records: Iterable[Record], pipeline: Pipeline) -> Iterator[RecordedOperation]:
    """The operations that the workers of a pipeline did, each worker's in their order."""
    for one in records:
        if one["generation"] == pipeline.generation and pipeline.begin <= one["time"] < pipeline.end:
            span, step = span_of(one), one.get("step")
            if (
                span is not None
                and 0 <= one["rank"] < pipeline.workers
                and 0 <= span.operation.stage < len(pipeline.stages)
            ):
                yield RecordedOperation(one["rank"], step if type(step) is int else None, span)
