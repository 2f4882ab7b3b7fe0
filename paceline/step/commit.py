"""The end of a synchronous step, the same on every worker: check it, then update the model or skip it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch

from paceline.data.feed import Piece, split_piece
from paceline.data.keys import UPDATE, seed_torch
from paceline.step.checks import Part, check_gradients, mean_loss, mean_metrics, non_finite, not_finite, unused
from paceline.step.closures import Again, LeftOutError, with_closure
from paceline.step.job import Job, StepResult

Apply: TypeAlias = Callable[[int], tuple[torch.Tensor | float, float]]
"""Updates the model from the mean gradients in ``.grad``, as :meth:`Update.apply`."""


def with_norm(job: Job, norm: torch.Tensor, known: float) -> Apply:
    """An update whose global norm is on the device, where gradients are clipped by it, and known to the host too."""

    def apply(step: int) -> tuple[float, float]:
        _, rate = job.update.apply(step, norm=norm)
        return known, rate

    return apply


def commit(  # noqa: PLR0913 - what is known of a step
    job: Job,
    step: int,
    pieces: list[Piece],
    parts: list[Part],
    statistics: list[torch.Tensor],
    notice: int = 0,
    apply: Apply | None = None,
    again: Again | None = None,
) -> StepResult:
    """Check a step whose mean gradients are in ``.grad``, and update the model.

    Args:
        job: what is trained.
        step: its number.
        pieces: what this worker computed.
        parts: what is known of all pieces of all workers, in the order of microbatches.
        statistics: the means of the buffers that the forward pass changes.
        notice: about the world, from any worker.
        apply: makes the update; None: this worker makes all of it.
        again: computes the gradients again, for an optimizer that needs a closure; None: the strategy cannot.

    Raises:
        NonFiniteLoss: a loss is NaN or infinite, and the run is to stop.
        InputError: a parameter has a gradient from some microbatches only, and the run is to stop.
    """

    def usable(parts: list[Part]) -> tuple[float, dict[str, float]]:
        skipped = skip(job, step, parts, lambda bad: _locate(job, step, pieces, bad), notice)
        if skipped is not None:
            raise LeftOutError(skipped)
        return means(job, parts)

    try:
        loss, metrics = usable(parts)
        carried = job.compute.carried
        states = {} if carried is None else carried.exchange(job.world, step)
        job.world.confirm(step)
        with with_closure(job, step, again, lambda parts: usable(parts)[0], statistics):
            seed_torch(job.compute.seed(UPDATE, step))  # for optimizers that draw random numbers
            norm, rate = (apply or job.update.apply)(step)
    except LeftOutError as left_out:
        return left_out.result
    if carried is not None:
        carried.accept(step, states)
    return StepResult(loss, norm, rate, _applied(job, step), notice, metrics)


def _applied(job: Job, step: int) -> bool:
    """Whether the update was made: not if a gradient was too large for float16."""
    scale = job.update.loss_scale
    if scale is None or not scale.overflowed:
        return True
    reason = f"a gradient is too large for float16: the loss scale is {scale.value:g} now"
    job.events.mark("skipped", step=step, reason=reason)
    return False


def means(job: Job, parts: list[Part]) -> tuple[float, dict[str, float]]:
    """The mean loss over the batch, and the means of its metrics."""
    exact = job.settings.exact
    return mean_loss(parts, exact), mean_metrics(parts, job.compute.metrics, exact)


def skip(job: Job, step: int, parts: list[Part], locate: Callable[[Part], range], notice: int = 0) -> StepResult | None:
    """The result of a step that is to be left out, as a loss is not finite; None if it is sound.

    Args:
        job: what is trained.
        step: its number; its mean gradients are in ``.grad``.
        parts: what is known of all pieces.
        locate: the microbatches of a piece to which a loss that is not finite goes back.
        notice: for the result.

    Raises:
        NonFiniteLoss, InputError: see :func:`commit`.
    """
    bad = not_finite(parts)
    if bad is not None:
        job.compute.buffers.reset()
        error = non_finite(bad, locate(bad), step)
        if job.settings.nonfinite == "stop":
            raise error
        job.events.mark("skipped", step=step, reason=str(error))
        loss, metrics = means(job, parts)
        return StepResult(loss, math.nan, job.update.learning_rate, applied=False, notice=notice, metrics=metrics)
    if any(part.missing for part in parts):
        _drop_unused(job, parts)
    return None


def _drop_unused(job: Job, parts: list[Part]) -> None:
    parameters = job.update.parameters
    if job.settings.missing_gradient == "stop":
        job.compute.buffers.reset()
        check_gradients(parts, list(parameters))
    without = unused(parts)
    for place, parameter in enumerate(parameters.values()):
        if place in without:
            parameter.grad = None


def _locate(job: Job, step: int, pieces: list[Piece], bad: Part) -> range:
    """Find the microbatch of a piece whose loss is not finite: its worker looks, all get the answer."""
    if len(bad.microbatches) == 1:
        return bad.microbatches
    found = locate_here(job, step, pieces, bad) if bad.rank == job.world.rank else bad.microbatches
    located: range = job.world.gather(found, "step")[bad.rank]
    return located


def locate_here(job: Job, step: int, pieces: list[Piece], bad: Part) -> range:
    """Find the microbatch of a piece of this worker whose loss is not finite; all of them if no single one is."""
    (piece,) = (piece for piece in pieces if piece.microbatches == bad.microbatches)
    for part in split_piece(piece, job.order.parts_of(step)) if len(bad.microbatches) > 1 else ():
        if not job.compute.loss_only(part)[:2].isfinite().all():
            return part.microbatches
    return bad.microbatches
