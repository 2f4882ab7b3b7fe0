"""End of a synchronous step, the same on every worker: check the results, then update the model or skip the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch

from paceline.data.feed import MicrobatchGroup, split_group
from paceline.data.keys import UPDATE, seed_torch
from paceline.step.checks import (
    MicrobatchResult,
    check_gradients,
    mean_loss,
    mean_metrics,
    non_finite,
    non_finite_batch,
    not_finite,
    unused,
)
from paceline.step.closures import Again, LeftOutError, with_closure
from paceline.step.context import StepResult, TrainingContext

Apply: TypeAlias = Callable[[int], tuple[torch.Tensor | float, float]]
"""Updates the model from the mean gradients in ``.grad``, as :meth:`OptimizerStep.apply` does."""


def with_norm(context: TrainingContext, norm: torch.Tensor, known: float) -> Apply:
    """Return an update that clips by ``norm`` on the device and reports ``known``, the same norm on the host."""

    def apply(step: int) -> tuple[float, float]:
        _, rate = context.update.apply(step, norm=norm)
        return known, rate

    return apply


def commit(  # noqa: PLR0913 - the results of a step
    context: TrainingContext,
    step: int,
    groups: list[MicrobatchGroup],
    parts: list[MicrobatchResult],
    statistics: list[torch.Tensor],
    notice: int = 0,
    apply: Apply | None = None,
    again: Again | None = None,
) -> StepResult:
    """Check a step whose mean gradients are in ``.grad``, and update the model.

    Args:
        parts: results of all workers' microbatch groups, in the order of microbatches.
        statistics: means of the buffers that the forward pass changes.
        apply: makes the update. Defaults to a full update on this worker.
        again: recomputes the gradients for an optimizer that needs a closure. None if the strategy cannot.

    Raises:
        NonFiniteLoss: a loss is NaN or infinite, and ``nonfinite`` is "stop".
        InputError: a parameter has a gradient from some microbatches only, and ``missing_gradient`` is "stop".
    """

    def usable(parts: list[MicrobatchResult]) -> tuple[float, dict[str, float]]:
        skipped = skip(context, step, parts, lambda bad: _locate(context, step, groups, bad), notice)
        if skipped is not None:
            raise LeftOutError(skipped)
        return means(context, parts)

    try:
        loss, metrics = usable(parts)
        carried = context.compute.carried
        states = {} if carried is None else carried.exchange(context.world, step)
        context.world.confirm(step)
        with with_closure(context, step, again, lambda parts: usable(parts)[0], statistics):
            seed_torch(context.compute.seed(UPDATE, step))  # for optimizers that draw random numbers
            norm, rate = (apply or context.update.apply)(step)
    except LeftOutError as left_out:
        return left_out.result
    if carried is not None:
        carried.accept(step, states)
    return StepResult(loss, norm, rate, _applied(context, step), notice, metrics)


def _applied(context: TrainingContext, step: int) -> bool:
    """Return whether the update was made. It is skipped if a gradient overflowed float16."""
    scale = context.update.loss_scale
    if scale is None or not scale.overflowed:
        return True
    reason = f"a gradient is too large for float16: the loss scale is {scale.value:g} now"
    context.events.mark("skipped", step=step, reason=reason)
    return False


def means(context: TrainingContext, parts: list[MicrobatchResult]) -> tuple[float, dict[str, float]]:
    """Return the mean loss over the batch and the means of its metrics."""
    exact = context.settings.exact
    return mean_loss(parts, exact), mean_metrics(parts, context.compute.metrics, exact)


def skip(
    context: TrainingContext,
    step: int,  # step number. The mean gradients of the step are in ``.grad``.
    parts: list[MicrobatchResult],
    locate: Callable[[MicrobatchResult], range],  # returns the microbatches of a group whose loss is NaN or infinite
    notice: int = 0,
) -> StepResult | None:
    """Return the result of a step that is skipped because a loss is NaN or infinite, or None if all losses are finite.

    Raises:
        NonFiniteLoss, InputError: see :func:`commit`.
    """
    if (bad := not_finite(parts)) is not None:
        context.compute.buffers.reset()
        whole = context.compute.batch_loss is not None
        error = non_finite_batch(bad, step) if whole else non_finite(bad, locate(bad), step)
        if context.settings.nonfinite == "stop":
            raise error
        context.events.mark("skipped", step=step, reason=str(error))
        loss, metrics = means(context, parts)
        return StepResult(loss, math.nan, context.update.learning_rate, applied=False, notice=notice, metrics=metrics)
    if any(part.missing for part in parts):
        _drop_unused(context, parts)
    return None


def _drop_unused(context: TrainingContext, parts: list[MicrobatchResult]) -> None:
    parameters = context.update.parameters
    if context.settings.missing_gradient == "stop":
        context.compute.buffers.reset()
        check_gradients(parts, list(parameters))
    without = unused(parts)
    for place, parameter in enumerate(parameters.values()):
        if place in without:
            parameter.grad = None


def _locate(context: TrainingContext, step: int, groups: list[MicrobatchGroup], bad: MicrobatchResult) -> range:
    """Find the microbatch whose loss is not finite. The worker that computed the group searches, all get the answer."""
    if len(bad.microbatches) == 1:
        return bad.microbatches
    found = locate_here(context, step, groups, bad) if bad.rank == context.world.rank else bad.microbatches
    located: range = context.world.gather(found, "step")[bad.rank]
    return located


def locate_here(context: TrainingContext, step: int, groups: list[MicrobatchGroup], bad: MicrobatchResult) -> range:
    """Find the microbatch of a local group whose loss is not finite. Returns the whole group if no single loss is.

    In an audited step the group may be a part of the one that was loaded.
    """
    if len(bad.microbatches) == 1:
        return bad.microbatches
    parts = context.order.parts_of(step)
    for part in (part for group in groups for part in split_group(group, parts)):
        if part.microbatches.start in bad.microbatches and not context.compute.loss_only(part)[:2].isfinite().all():
            return part.microbatches
    return bad.microbatches
