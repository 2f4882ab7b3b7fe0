"""After a loss, where each worker has a part of the state: who has which part, and of which step."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.training_state import TrainingState
from paceline.errors import CheckpointError
from paceline.step.gather_state import bring_together
from paceline.step.job import Job
from paceline.strategies import registry


@dataclass(frozen=True)
class StateShard:
    """What one worker has: how many steps it has done, and the parameters and buffers whose newest values it has.

    ``holds``: none if it has all.
    """

    steps: int
    holds: frozenset[str] | None


def assemble(job: Job, told: list[StateShard | None]) -> bool:
    """Give all workers the whole state; all call this together.

    Args:
        job: what is trained.
        told: what each worker has; none if it has nothing yet.

    Returns:
        whether there is a whole state now; else something is lost, or the parts belong to different steps, which only
        a strategy without the bits of the reference can put up with.

    Raises:
        WorkerLost: another worker was lost meanwhile.
    """
    if all(part is None or part.holds is None for part in told):
        return True
    if missing(job, told):
        return False
    steps = {part.steps for part in told if part is not None}
    settings = job.settings
    if len(steps) > 1 and registry.capabilities(settings, job.world.size).exact:
        return False
    bring_together(job, [frozenset() if part is None else part.holds for part in told])
    return True


def missing(job: Job, told: list[StateShard | None]) -> list[str]:
    """The parameters and buffers whose newest values nobody has."""
    held = [part.holds for part in told if part is not None]
    if None in held:
        return []
    names = {name for name, _ in [*job.compute.model.named_parameters(), *job.compute.model.named_buffers()]}
    return sorted(names.difference(*(one for one in held if one is not None)))


def go_back(job: Job, checkpointer: Checkpointer, state: TrainingState, told: list[StateShard | None]) -> int:
    """Take the newest checkpoint on all workers; returns its step.

    Raises:
        CheckpointError: there is none.
    """
    steps = checkpointer.resume(state, "auto") if checkpointer.enabled else 0
    if steps == 0:
        lost = missing(job, told)
        what = (
            f"{len(lost)} parameters and buffers, {lost[0]!r} among them, were" if lost else "The state of a step was"
        )
        raise CheckpointError(
            f"Rank {job.world.rank}: {what} held by lost workers only, and there is no checkpoint to go back to. Save "
            f"one now and then (checkpoint.every), or let two workers hold each stage."
        )
    return steps
