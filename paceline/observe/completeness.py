"""Which steps of a pipeline are recorded in full: an event file may lack records (:mod:`paceline.events`).

Each operation on a microbatch, by whichever worker, is one that the schedule of the step has. How many microbatches a
step had nobody records: as many as the highest one in its operations says.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TypeAlias

from paceline.errors import ConfigError
from paceline.observe.pipelines import Pipeline, RecordedOperation
from paceline.schedule.choice import async_pipeline_for, synchronous_schedule
from paceline.schedule.operations import Kind, Schedule
from paceline.schedule.pipedream import async_schedule

_Action: TypeAlias = tuple[int, Kind, int, int, int]
"""What a worker did: rank, kind, stage, microbatch, peer."""
_ENTERS: _Action = (0, Kind.FORWARD, 0, 0, -1)
"""The first microbatch of a step enters."""


def complete_steps(done: Iterable[RecordedOperation], pipeline: Pipeline) -> list[int]:
    """The steps that can be drawn: those that have an end and of which each worker's operations are all there.

    In a pipeline that does not run empty a step has operations of the steps before it as well, which must be there too,
    and ends where the next one enters. Its updates are not about a step: whether they are all there nobody can tell.
    """
    actions, same = defaultdict[int, list[_Action]](list), dict[_Action, _Action]()
    for rank, step, (operation, _, _) in done:
        kind, stage, microbatch, _, peer = operation
        if step is not None and microbatch >= 0:
            action = (rank, kind, stage, microbatch, peer)
            actions[step].append(same.setdefault(action, action))  # one object for all steps
    whole = _matching(actions, pipeline)
    first, earlier = min(pipeline.steps, default=0), _earlier(pipeline)
    return [
        step
        for step in pipeline.ended
        if all(one in whole for one in range(max(first, step - earlier), step + 1))
        and (not pipeline.streamed or _ENTERS in actions[step + 1])
    ]


def _matching(actions: Mapping[int, list[_Action]], pipeline: Pipeline) -> set[int]:
    """The steps of which all operations on their own microbatches are there, once."""

    @lru_cache
    def expected(microbatches: int) -> list[_Action]:
        try:
            schedule = _schedule(pipeline, microbatches)
        except ConfigError:  # so many microbatches no step has
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
    if pipeline.streamed:
        return async_schedule(
            async_pipeline_for(pipeline.settings, pipeline.workers, pipeline.microbatches), microbatches
        )
    return synchronous_schedule(pipeline.settings, pipeline.workers, microbatches)


def _earlier(pipeline: Pipeline) -> int:
    """Microbatches of so many steps before may be under way in a step; one more, as one of them may be a short one."""
    if not pipeline.streamed:
        return 0
    stream = async_pipeline_for(pipeline.settings, pipeline.workers, pipeline.microbatches)
    return math.ceil(stream.lag(0) / pipeline.microbatches) + 1
