"""After a loss, where each worker has a shard of the state: bring the shards together, or go back to a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.training_state import TrainingState
from paceline.errors import CheckpointError
from paceline.partition.flags import requires_grad_flags, training_flags
from paceline.step.gather_state import gather_state
from paceline.step.job import Job
from paceline.strategies import registry
from paceline.training.progress import Progress


def assemble(job: Job, everyone: Sequence[Progress | None]) -> bool:
    """Give all workers the whole state; all call this together.

    Args:
        job: what is trained.
        everyone: the progress of each worker; none if it has no state yet.

    Returns:
        whether there is a whole state now; else something is lost, or the shards belong to different steps, which only
        a strategy without the bits of the reference can accept.

    Raises:
        WorkerLost: another worker was lost meanwhile.
    """
    if all(one is None or one.holds is None for one in everyone):
        return True
    if missing(job, everyone):
        return False
    steps = {one.steps for one in everyone if one is not None}
    settings = job.settings
    if len(steps) > 1 and registry.capabilities(settings, job.world.size).exact:
        return False
    gather_state(job, [frozenset() if one is None else one.holds for one in everyone])
    return True


def missing(job: Job, everyone: Sequence[Progress | None]) -> list[str]:
    """The parameters and buffers whose newest values nobody has."""
    held = [one.holds for one in everyone if one is not None]
    if None in held:
        return []
    names = {name for name, _ in [*job.compute.model.named_parameters(), *job.compute.model.named_buffers()]}
    return sorted(names.difference(*(one for one in held if one is not None)))


def go_back(job: Job, checkpointer: Checkpointer, state: TrainingState, everyone: Sequence[Progress | None]) -> int:
    """Take the newest checkpoint on all workers; returns its step.

    Raises:
        CheckpointError: there is none.
    """
    modes, trained = training_flags(job.compute.model), requires_grad_flags(job.compute.model.parameters())
    with (
        modes.set_to(modes.current()),
        trained.set_to(trained.current()),
    ):  # the scripts are beyond the checkpoint, and have set them meanwhile
        steps = checkpointer.resume(state, "auto") if checkpointer.enabled else 0
    if steps == 0:
        lost = missing(job, everyone)
        what = (
            f"{len(lost)} parameters and buffers, {lost[0]!r} among them, were" if lost else "The state of a step was"
        )
        raise CheckpointError(
            f"Rank {job.world.rank}: {what} held by lost workers only, and there is no checkpoint to go back to. Save "
            f"regularly (checkpoint.every), or let two workers hold each part of the model."
        )
    return steps
