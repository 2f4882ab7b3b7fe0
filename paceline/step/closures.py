"""Optimizers that compute the loss again within a step, such as LBFGS, and SAM with its two passes.

::

    forward, backward, reduce ─ optimizer.step(closure) ──────────────────────────────── next step
                                  │ closure: forward, backward, reduce   w + e
                                  │ closure: forward, backward, reduce   ...

A closure recomputes the microbatches of the step with the current weights. Each worker recomputes its own microbatches
with the same random numbers, starting from the buffers at the start of the step. All workers get the same loss and
gradients, so their optimizers decide alike and call the closure equally often.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from paceline.data.keys import preserve_generators
from paceline.errors import ConfigError, InputError
from paceline.step.checks import MicrobatchResult
from paceline.step.context import StepResult, TrainingContext
from paceline.step.optimizer import OptimizerStep
from paceline.step.optimizers.several import parts_of

Again: TypeAlias = Callable[[], list[MicrobatchResult]]
"""Recomputes the mean gradients of the step. Returns the results of all workers' microbatch groups."""


class LeftOutError(Exception):
    """Raised to skip a step whose loss is NaN or infinite. ``result`` is the result of the step."""

    def __init__(self, result: StepResult) -> None:
        super().__init__()
        self.result = result


def check_closures(update: OptimizerStep, strategy: str, *, able: bool, phases: bool, carries: bool) -> None:
    """Raise if an optimizer needs a closure and the run cannot provide one.

    Args:
        able: whether the strategy can recompute a step, and autocast is not float16.
        carries: whether the forward pass carries a state from batch to batch.
    """
    if not update.closure_users:
        return
    parts, kind = parts_of(update.optimizer), update.closure_users[0]
    what = f"{kind} computes the loss several times in each step (it needs a closure)"
    if not able:
        raise ConfigError(
            f"{what}, which strategy {strategy!r} or autocast = 'float16' does not support: use 'allreduce', and "
            f"'bfloat16'."
        )
    if len(parts) > 1 and not phases:
        raise InputError(
            f"{what}, but it is one of {len(parts)} optimizers with the same gradients: use it alone, or pass start a "
            f"forward for each optimizer, by name."
        )
    if carries:
        raise InputError(f"{what}, which a forward pass that hands a state from batch to batch cannot repeat.")


@contextmanager
def with_closure(
    context: TrainingContext,
    step: int,
    again: Again | None,
    loss_of: Callable[[list[MicrobatchResult]], float],
    statistics: list[torch.Tensor],
) -> Iterator[None]:
    """Give the optimizer the closure it needs while the update is made. A failed update that may be repeated is undone.

    Args:
        again: recomputes the gradients of the step.
        loss_of: returns the mean loss. Raises if the loss cannot be used.
        statistics: means of the buffers that the forward pass changes. A closure does not see them yet.
    """
    buffers = context.compute.buffers
    if not context.update.closure_users:
        yield
        buffers.accept(statistics)
        return
    assert again is not None, "the strategy was checked at the start"
    update, compute = context.update, again

    def closure() -> torch.Tensor:
        with preserve_generators(), torch.enable_grad():
            loss = loss_of(compute())
        update.clip()
        _keep_gradients(update)
        return torch.tensor(loss, dtype=torch.float64)

    def take(optimizer: Any) -> None:
        _keep_gradients(update)
        optimizer.step(closure)
        context.world.confirm(step)

    repeatable = context.settings.nonfinite == "skip" or (
        context.world.coordinator is not None and context.world.size > 1
    )
    undo = _saved(update) if repeatable else None
    update.take = take
    try:
        yield
    except BaseException:
        if undo is not None:
            undo()
        buffers.reset()
        raise
    finally:
        update.take = None
    buffers.accept(statistics)


def _keep_gradients(update: OptimizerStep) -> None:
    """Clone the gradients, because the next reduction overwrites its own buffers."""
    for value in update.parameters.values():
        if value.grad is not None:
            value.grad = value.grad.clone()


def _saved(update: OptimizerStep) -> Callable[[], None]:
    """Copy the weights, the optimizer's state and its groups. Returns a function that restores them."""
    optimizer = update.optimizer
    weights = [(value, value.detach().clone()) for value in update.parameters.values()]
    states = {value: copy.deepcopy(state) for value, state in optimizer.state.items()}
    groups = [dict(group) for group in optimizer.param_groups]

    def undo() -> None:
        with torch.no_grad():
            for value, before in weights:
                value.copy_(before)
        optimizer.state.clear()
        optimizer.state.update(states)
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.update(saved)

    return undo
