"""Inner step of local training: an update of one replica from microbatches of its own."""

from __future__ import annotations

import math

from paceline.data.feed import MicrobatchGroup
from paceline.data.keys import UPDATE, seed_torch
from paceline.step.checks import MicrobatchResult
from paceline.step.commit import locate_here, skip
from paceline.step.context import StepResult, TrainingContext
from paceline.strategies.full_batch import FullBatch
from paceline.strategies.local.replica import Replica


def inner_step(
    context: TrainingContext, batch: FullBatch, step: int, groups: list[MicrobatchGroup], replica: Replica
) -> tuple[StepResult, list[MicrobatchResult]]:
    """Update a replica with the gradients of these groups. Returns the result of the step and of each group."""
    with replica.in_model():
        results, changed = batch.gradients(step, groups)
        skipped = skip(context, step, results, lambda bad: locate_here(context, step, groups, bad))
        if skipped is None:
            context.compute.buffers.accept(changed)
            seed_torch(context.compute.seed(UPDATE, step))
            norm, rate = context.update.apply_inner(step)
            counted = math.fsum(part.counted for part in results)
            replica.counts = [count + counted for count in replica.counts]
        batch.take_gradients()
    return skipped or StepResult(math.nan, norm, rate), results
