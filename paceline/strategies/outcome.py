"""The end of a synchronous step, the same on every worker: judge it, then update the model or not."""

from __future__ import annotations

import torch

from paceline.data.feed import Piece, apart
from paceline.data.keys import UPDATE, seed_of, seed_torch
from paceline.strategies.base import Job, Outcome
from paceline.strategies.verdict import Part, check_gradients, mean_loss, not_finite, refusal, unused


def conclude(
    job: Job, step: int, pieces: list[Piece], parts: list[Part], statistics: list[torch.Tensor], notice: int = 0
) -> Outcome:
    """Judge a step whose mean gradients are in ``.grad``, and update the model.

    Args:
        job: what is trained.
        step: its number.
        pieces: what this worker computed.
        parts: the outcome of all pieces of all workers, in the order of microbatches.
        statistics: the means of the buffers that the forward pass changes.
        notice: what the workers told each other of the world.

    Raises:
        NonFiniteLoss: a loss is NaN or infinite, and the run is to stop.
        InputError: a parameter has a gradient from some microbatches only, and the run is to stop.
    """
    bad = not_finite(parts)
    if bad is not None:
        job.compute.buffers.reset()
        error = refusal(bad, _located(job, step, pieces, bad), step)
        if job.settings.nonfinite == "stop":
            raise error
        job.events.mark("skipped", step=step, reason=str(error))
        loss = mean_loss(parts, job.settings.exact)
        return Outcome(loss, torch.tensor(float("nan")), job.update.learning_rate, applied=False, notice=notice)
    parameters = job.update.parameters
    if job.settings.missing_gradient == "stop":
        job.compute.buffers.reset()
        check_gradients(parts, list(parameters))
    without = unused(parts)
    for place, parameter in enumerate(parameters.values()):
        if place in without:
            parameter.grad = None
    job.compute.buffers.accept(statistics)
    loss = mean_loss(parts, job.settings.exact)
    seed_torch(seed_of(UPDATE, job.settings.seed, step))  # for optimizers that draw random numbers
    norm, rate = job.update.apply(step)
    return Outcome(loss, norm, rate, notice=notice)


def _located(job: Job, step: int, pieces: list[Piece], bad: Part) -> range:
    """The one microbatch of a piece whose loss is not finite; the worker that has the data looks, and tells all."""
    if len(bad.microbatches) == 1:
        return bad.microbatches
    found = bad.microbatches
    if bad.rank == job.world.rank:
        (piece,) = (piece for piece in pieces if piece.microbatches == bad.microbatches)
        for part in apart(piece, job.order.parts_of(step)):
            if not job.compute.loss_only(part).isfinite().all():
                found = part.microbatches
                break
    located: range = job.world.gather(found, "step")[bad.rank]
    return located
