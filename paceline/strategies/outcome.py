"""The end of a synchronous step, the same on every worker: judge it, then update the model or not."""

from __future__ import annotations

import torch

from paceline.strategies.base import Job, Outcome
from paceline.strategies.verdict import Part, check_gradients, mean_loss, not_finite, unused


def conclude(job: Job, step: int, parts: list[Part], statistics: list[torch.Tensor]) -> Outcome:
    """Judge a step whose mean gradients are in ``.grad``, and update the model.

    Args:
        job: what is trained.
        step: its number.
        parts: the outcome of all pieces of all workers, in the order of microbatches.
        statistics: the means of the buffers that the forward pass changes.

    Raises:
        NonFiniteLoss: a loss is NaN or infinite, and the run is to stop.
        InputError: a parameter has a gradient from some microbatches only, and the run is to stop.
    """
    error = not_finite(parts, step)
    if error is not None and job.settings.nonfinite == "stop":
        raise error
    if error is not None:
        job.compute.buffers.reset()
        job.events.mark("skipped", step=step, reason=str(error))
        return Outcome(
            mean_loss(parts, job.settings.exact), torch.tensor(float("nan")), job.update.learning_rate, False
        )
    parameters = job.update.parameters
    if job.settings.missing_gradient == "stop":
        check_gradients(parts, list(parameters))
    without = unused(parts)
    for place, parameter in enumerate(parameters.values()):
        if place in without:
            parameter.grad = None
    job.compute.buffers.accept(statistics)
    loss = mean_loss(parts, job.settings.exact)
    norm, rate = job.update.apply(step)
    return Outcome(loss, norm, rate)
