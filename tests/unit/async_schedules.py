"""Schedules of PipeDream and PipeDream-2BW from an empty pipeline to an empty pipeline."""

from paceline.schedule.pipeline.operations import Schedule
from paceline.schedule.pipeline.pipedream import (
    AsyncPipeline,
    drain,
    pipedream_2bw_pipeline,
    pipedream_pipeline,
    window,
)


def async_schedule(stream: AsyncPipeline, microbatches: int) -> Schedule:
    parts = window(stream, 0, microbatches), drain(stream, microbatches)
    workers = tuple(first + rest for first, rest in zip(*(part.workers for part in parts), strict=True))
    return Schedule(stream.name, stream.stages, microbatches, workers)


def pipedream(
    stages: int, microbatches: int, every: int = 1, vertical_sync: bool = False, replicas: int | tuple[int, ...] = 1
) -> Schedule:
    return async_schedule(pipedream_pipeline(stages, every, vertical_sync, replicas), microbatches)


def pipedream_2bw(stages: int, microbatches: int, every: int, replicas: int | tuple[int, ...] = 1) -> Schedule:
    return async_schedule(pipedream_2bw_pipeline(stages, every, replicas), microbatches)
