"""Pipelines in the records of a run: how the model was cut, and the operations of the workers.

Rank 0 records each ``cut``. Later records belong to this cut until the next cut, which follows when another session
begins, after a resume, when a worker was lost, or because another cut is faster.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paceline.errors import InputError
from paceline.observe.records import Record, number
from paceline.schedule.pipeline.choice import ASYNC_SCHEDULES, shape_of
from paceline.schedule.pipeline.clock import Span
from paceline.schedule.pipeline.operations import Kind, Operation
from paceline.settings import PipelineSettings

KINDS = {kind.name.lower(): kind for kind in Kind}  # kinds of operations by the names of their events


@dataclass(frozen=True)
class Pipeline:
    """Model cut into stages, from this cut to the next cut."""

    generation: int  # membership generation of the workers
    begin: float  # time of the cut, in seconds since 1970
    end: float  # time of the next cut
    again: bool  # whether the model was cut in the middle of a loop, because another cut is faster
    device: str  # type of the devices. Empty if unknown.
    workers: int  # number of workers
    microbatches: int  # number of microbatches in a full batch
    settings: PipelineSettings  # settings of the pipeline
    stages: tuple[tuple[str, ...], ...]  # names of the layers of each stage
    # forward and backward seconds of each stage per microbatch, profiled before training. None if the layers were not
    # profiled.
    times: tuple[tuple[float, float], ...] | None
    # steps that all workers finished, with the seconds of the slowest worker, data and update included
    steps: dict[int, float] = field(default_factory=dict)

    @property
    def asynchronous(self) -> bool:
        """Whether the pipeline runs without a flush at the end of a step."""
        return self.settings.schedule in ASYNC_SCHEDULES

    @property
    def finished_steps(self) -> list[int]:
        """Steps with a known end. In an asynchronous pipeline, a step ends when the next step begins."""
        return sorted(step for step in self.steps if not self.asynchronous or step + 1 in self.steps)


class RecordedOperation(NamedTuple):
    """A recorded operation of a worker."""

    rank: int  # rank of the worker
    step: int | None  # step of the microbatch. None for an operation without a microbatch.
    span: Span  # the operation and its times, in seconds since 1970. The microbatch is numbered within its step.


class _CutRecord(NamedTuple):
    """Start of a pipeline. ``pipeline`` is None if the record cannot be read."""

    generation: int
    begin: float
    again: bool
    pipeline: Pipeline | None


class _StepRecord(NamedTuple):
    """End of a step on one worker."""

    step: int
    rank: int
    generation: int
    end: float
    seconds: float


def pipelines_of(records: Iterable[Record]) -> list[Pipeline]:
    """Return the pipelines in the records ``cut`` and ``step`` of a run, oldest first."""
    cuts: list[Record] = []
    finished: list[_StepRecord] = []
    for record in records:
        if record["event"] == "cut":
            cuts.append(record)
        elif record["event"] == "step" and (one := _finished(record)) is not None:
            finished.append(one)
    found = _cuts(cuts)
    if found and all(cut.pipeline is None for cut in found):
        raise InputError(
            "The records of how the model was cut are from another version of Paceline, which this one cannot draw. "
            "Train some new steps: resume the run (paceline run --set resume=auto ...), or start a new one."
        )
    seconds: dict[int, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for one in finished:
        place = _index_of(found, one)
        if place is not None:
            seconds[place][one.step][one.rank] = one.seconds
    return [
        replace(
            cut.pipeline,
            steps={step: max(by_rank.values()) for step, by_rank in seconds[place].items() if len(by_rank) == workers},
        )
        for place, cut in enumerate(found)
        if cut.pipeline is not None and (workers := cut.pipeline.workers)
    ]


def _finished(record: Record) -> _StepRecord | None:
    step, seconds = record.get("step"), number(record.get("seconds"))
    if type(step) is not int or seconds is None:
        return None
    return _StepRecord(step, record["rank"], record["generation"], float(record["time"]), seconds)


def _cuts(records: Iterable[Record]) -> list[_CutRecord]:
    ordered = sorted(records, key=lambda one: float(one["time"]))
    ends = [*(float(one["time"]) for one in ordered[1:]), math.inf]
    return [
        _CutRecord(one["generation"], float(one["time"]), one.get("again") is True, _pipeline(one, end))
        for one, end in zip(ordered, ends, strict=False)
    ]


def _pipeline(cut: Record, end: float) -> Pipeline | None:
    """Parse the record of a cut. Returns None if it is from another version."""
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


def _index_of(cuts: Sequence[_CutRecord], step: _StepRecord) -> int | None:
    """Return the index of the cut of a step. A cut in the middle of a loop counts only for steps that begin later."""
    for place in range(len(cuts) - 1, -1, -1):
        since = step.end - step.seconds if cuts[place].again else step.end
        if cuts[place].generation == step.generation and cuts[place].begin <= since:
            return place
    return None


def span_of(record: Record) -> Span | None:
    """Return the operation of a record and its times in seconds since 1970, or None if fields are missing or invalid.

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
    for one in records:
        if one["generation"] == pipeline.generation and pipeline.begin <= one["time"] < pipeline.end:
            span, step = span_of(one), one.get("step")
            if (
                span is not None
                and 0 <= one["rank"] < pipeline.workers
                and 0 <= span.operation.stage < len(pipeline.stages)
            ):
                yield RecordedOperation(one["rank"], step if type(step) is int else None, span)
