"""Choice of the schedule for the pipeline settings and a number of workers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from paceline.errors import ConfigError
from paceline.schedule.pipeline.interleaved import interleaved
from paceline.schedule.pipeline.operations import Operation, Schedule
from paceline.schedule.pipeline.pipedream import AsyncPipeline, pipedream_2bw_pipeline, pipedream_pipeline
from paceline.schedule.pipeline.synchronous import gpipe, layerwise, one_forward_one_backward
from paceline.schedule.pipeline.zero_bubble import zero_bubble_h1, zero_bubble_v
from paceline.settings import PipelineSettings

_UNEVEN = "gpipe", "1f1b", "pipedream", "2bw"
ASYNC_SCHEDULES = "pipedream", "2bw"  # schedules that do not flush the pipeline after each step


class Shape(NamedTuple):
    """Layout of a pipeline: stages, stages per worker, and workers of each stage."""

    stages: int
    chunks: int
    replicas: tuple[int, ...]


def shape_of(settings: PipelineSettings, workers: int) -> Shape:
    chunks = {"interleaved": settings.chunks, "zb-v": 2}.get(settings.schedule, 1)
    if settings.schedule == "interleaved" and chunks < 2:
        raise ConfigError(
            "pipeline.chunks = 1 with schedule 'interleaved': give each worker 2 stages or more, or use '1f1b'."
        )
    given = {"pipeline.stages": settings.stages}
    if settings.cut is not None:
        given[f"pipeline.cut, which names the beginnings of all but the first of {len(settings.cut) + 1} stages"] = (
            len(settings.cut) + 1
        )
    if settings.replicas is not None:
        given[f"pipeline.replicas, which are those of {len(settings.replicas)} stages"] = len(settings.replicas)
    numbers = {what: number for what, number in given.items() if number is not None}
    if len(set(numbers.values())) > 1:
        stated = " and ".join(f"{what} ({number})" for what, number in numbers.items())
        raise ConfigError(f"The number of stages differs between {stated}: make them agree, or leave one out.")
    stages = next(iter(numbers.values()), workers * chunks)
    if stages % chunks:
        raise ConfigError(
            f"{stages} stages are not a multiple of {chunks}, the number on each worker with schedule "
            f"{settings.schedule!r}: change pipeline.stages, or the schedule."
        )
    if settings.replicas is not None:
        return _with_replicas(settings, workers, Shape(stages, chunks, settings.replicas))
    if settings.schedule in _UNEVEN and workers >= stages:
        each, more = divmod(workers, stages)
        return Shape(stages, chunks, tuple(each + (stage < more) for stage in range(stages)))
    if workers % (stages // chunks):
        held = f", {chunks} on each worker" if chunks > 1 else ""
        raise ConfigError(
            f"{workers} workers cannot hold {stages} stages{held} evenly: the workers must be a multiple of "
            f"{stages // chunks}. Change pipeline.stages or the number of workers, or set pipeline.replicas, the "
            f"workers of each stage."
        )
    return Shape(stages, chunks, (workers * chunks // stages,) * stages)


def _with_replicas(settings: PipelineSettings, workers: int, shape: Shape) -> Shape:
    _, chunks, replicas = shape
    if len(set(replicas)) > 1 and settings.schedule not in _UNEVEN:
        raise ConfigError(
            f"pipeline.replicas = {list(replicas)} differ between stages, which schedule {settings.schedule!r} does "
            f"not allow: use one of {', '.join(map(repr, _UNEVEN))}, or the same number of workers for each stage."
        )
    if sum(replicas) != workers * chunks:
        raise ConfigError(
            f"pipeline.replicas = {list(replicas)} are {sum(replicas) // chunks} workers, but there are {workers}."
        )
    return shape


def async_pipeline_for(settings: PipelineSettings, workers: int, microbatches: int) -> AsyncPipeline:
    """Return the asynchronous pipeline for batches of ``microbatches`` microbatches."""
    _, _, replicas = shape_of(settings, workers)
    every = settings.update_every or microbatches
    turns = math.lcm(*replicas)
    if microbatches % turns:
        raise ConfigError(
            f"pipeline.replicas = {list(replicas)} take the {microbatches} microbatches of a batch in turn: set "
            f"microbatches to a multiple of {turns}."
        )
    try:
        if settings.schedule == "2bw":
            return pipedream_2bw_pipeline(len(replicas), every, replicas)
        return pipedream_pipeline(len(replicas), every, settings.vertical_sync, replicas)
    except ConfigError as error:
        raise ConfigError(
            f"{error}. Here every is pipeline.update_every, by default the number of microbatches in a batch."
        ) from error


def synchronous_schedule(settings: PipelineSettings, workers: int, microbatches: int) -> Schedule:
    """Return the schedule of a synchronous pipeline's step. Workers without a microbatch have no operations.

    Raises:
        ConfigError: the settings do not match each other or the number of workers.
    """
    stages, chunks, replicas = shape_of(settings, workers)
    along = replicas[: stages // chunks]
    busy = tuple(min(count, microbatches) for count in along)
    schedule = _synchronous(settings, Shape(stages, chunks, busy), microbatches)
    if busy == along:
        return schedule
    given = iter(schedule.workers)
    placed: list[tuple[Operation, ...]] = []
    for count, now in zip(along, busy, strict=True):
        placed += [*(next(given) for _ in range(now)), *((),) * (count - now)]
    return replace(schedule, workers=tuple(placed))


def _synchronous(settings: PipelineSettings, shape: Shape, microbatches: int) -> Schedule:
    stages, chunks, replicas = shape
    along = stages // chunks
    if settings.schedule == "interleaved":
        return interleaved(along, microbatches, chunks, replicas[0])
    if settings.schedule == "zb-v":
        return zero_bubble_v(along, microbatches, replicas[0])
    if settings.schedule == "zb-h1":
        return zero_bubble_h1(stages, microbatches, replicas[0])
    if settings.schedule == "layerwise":
        return layerwise(stages, microbatches, replicas[0])
    return {"gpipe": gpipe, "1f1b": one_forward_one_backward}[settings.schedule](stages, microbatches, replicas)
