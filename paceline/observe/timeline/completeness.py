"""Completeness of a pipeline's step records, because an event file may lack records (:mod:`paceline.events`).

The recorded operations on microbatches must match the schedule of the step. The number of microbatches in a step is
not recorded. It follows from the highest microbatch in the step's operations.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TypeAlias

from paceline.errors import ConfigError
from paceline.observe.timeline.pipelines import Pipeline, RecordedOperation
from paceline.schedule.pipeline.choice import async_pipeline_for, synchronous_schedule
from paceline.schedule.pipeline.operations import Kind, Schedule
from paceline.schedule.pipeline.pipedream import async_schedule

_Action: TypeAlias = tuple[int, Kind, int, int, int]  # operation of a worker: rank, kind, stage, microbatch, peer
_ENTERS: _Action = (0, Kind.FORWARD, 0, 0, -1)  # first microbatch of a step entering the pipeline


def complete_steps(done: Iterable[RecordedOperation], pipeline: Pipeline) -> list[int]:
    """Return the steps that can be drawn: finished steps with all operations of all workers.

    Without a flush, a step also has operations on microbatches of earlier steps, which must be complete too, and it
    ends when the next step enters. Updates then belong to no step and cannot be checked.
    """
    actions, same = defaultdict[int, list[_Action]](list), dict[_Action, _Action]()
    for rank, step, (operation, _, _) in done:
        kind, stage, microbatch, _, peer = operation
        if step is not None and microbatch >= 0:
            action = (rank, kind, stage, microbatch, peer)
            actions[step].append(same.setdefault(action, action))  # all steps share one object
    whole = _matching(actions, pipeline)
    first, earlier = min(pipeline.steps, default=0), _earlier(pipeline)
    return [
        step
        for step in pipeline.finished_steps
        if all(one in whole for one in range(max(first, step - earlier), step + 1))
        and (not pipeline.asynchronous or _ENTERS in actions[step + 1])
    ]


def _matching(actions: Mapping[int, list[_Action]], pipeline: Pipeline) -> set[int]:
    """Return the steps in which each operation on the step's own microbatches is recorded exactly once."""

    @lru_cache
    def expected(microbatches: int) -> list[_Action]:
        try:
            schedule = _schedule(pipeline, microbatches)
        except ConfigError:  # no step has this number of microbatches
            return []
        return sorted(
            (rank, kind, stage, microbatch, peer)
            for rank, operations in enumerate(schedule.workers)
            for kind, stage, microbatch, _, peer in operations
            if microbatch >= 0
        )

    found = set()
    for step, there in actions.items():
        microbatches = 1 + max(microbatch for _, _, _, microbatch, _ in there)
        if microbatches <= pipeline.microbatches and sorted(there) == expected(microbatches):
            found.add(step)
    return found


def _schedule(pipeline: Pipeline, microbatches: int) -> Schedule:
    if pipeline.asynchronous:
        return async_schedule(
            async_pipeline_for(pipeline.settings, pipeline.workers, pipeline.microbatches), microbatches
        )
    return synchronous_schedule(pipeline.settings, pipeline.workers, microbatches)


def _earlier(pipeline: Pipeline) -> int:
    """Return the number of earlier steps with microbatches in flight, plus 1 because a step may be short."""
    if not pipeline.asynchronous:
        return 0
    cut = async_pipeline_for(pipeline.settings, pipeline.workers, pipeline.microbatches)
    return math.ceil(cut.lag(0) / pipeline.microbatches) + 1
