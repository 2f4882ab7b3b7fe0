"""Optimizers that compute the loss again within a step, such as LBFGS, and SAM with its two passes.

::

    forward, backward, reduce ─ optimizer.step(closure) ──────────────────────────────── next step
                                  │ closure: forward, backward, reduce   w + e
                                  │ closure: forward, backward, reduce   ...

A closure computes the microbatches of the step once more, with the weights as they are now: each worker those it had,
with their random numbers, and with the buffers as they were at the start of the step. All workers get the same loss and
the same gradients, so their optimizers decide alike, and call it equally often.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from paceline.data.keys import preserve_generators
from paceline.errors import ConfigError, InputError
from paceline.step.checks import Part
from paceline.step.job import Job, StepResult
from paceline.step.optimizer import Update
from paceline.step.optimizers.several import parts_of

Again: TypeAlias = Callable[[], list[Part]]
"""Computes the mean gradients of the pieces of a step again; returns what is known of the pieces of all workers."""


class LeftOutError(Exception):
    """A step is to be left out, as a loss within it is not finite; ``result`` is what it gives."""

    def __init__(self, result: StepResult) -> None:
        super().__init__()
        self.result = result


def check_closures(update: Update, strategy: str, *, able: bool, phases: bool, carries: bool) -> None:
    """Refuse an optimizer that needs a closure where none can be given.

    Args:
        update: with the optimizer.
        strategy: its name.
        able: whether it can compute a step again.
        phases: whether each of several optimizers has a loss of its own.
        carries: whether the forward pass hands a state from batch to batch.

    Raises:
        ConfigError: the strategy cannot.
        InputError: the optimizer is one of several with the same gradients; or there is such a state.
    """
    if not update.closure_users:
        return
    parts, kind = parts_of(update.optimizer), update.closure_users[0]
    what = f"{kind} computes the loss several times in each step (it needs a closure)"
    if not able:
        raise ConfigError(
            f"{what}, which strategy {strategy!r} cannot do, nor float16: use 'allreduce', and 'bfloat16'."
        )
    if len(parts) > 1 and not phases:
        raise InputError(
            f"{what}, but it is one of {len(parts)} optimizers with the same gradients: use it alone, or give start a "
            f"forward for each optimizer, by name."
        )
    if carries:
        raise InputError(f"{what}, which a forward pass that hands a state from batch to batch cannot repeat.")


@contextmanager
def with_closure(
    job: Job,
    step: int,
    again: Again | None,
    loss_of: Callable[[list[Part]], float],
    statistics: list[torch.Tensor],
) -> Iterator[None]:
    """In which the update is made: its optimizer, if it needs a closure, gets one, and what fails leaves no trace.

    Args:
        job: what is trained.
        step: its number.
        again: computes its gradients again.
        loss_of: the mean loss; it raises for what cannot be used.
        statistics: the means of the buffers that the forward pass changes. A closure does not see them yet.
    """
    buffers = job.compute.buffers
    if not job.update.closure_users:
        buffers.accept(statistics)
        yield
        return
    assert again is not None, "the strategy was checked at the start"
    update, compute = job.update, again

    def closure() -> torch.Tensor:
        with preserve_generators(), torch.enable_grad():
            loss = loss_of(compute())
        update.clip()
        _keep_gradients(update)
        return torch.tensor(loss, dtype=torch.float64)

    def take(optimizer: Any) -> None:
        _keep_gradients(update)
        optimizer.step(closure)
        job.world.confirm(step)

    repeatable = job.settings.nonfinite == "skip" or (job.world.coordinator is not None and job.world.size > 1)
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


def _keep_gradients(update: Update) -> None:
    """Give the optimizer gradients of its own: those of a reduction are overwritten by the next one."""
    for value in update.parameters.values():
        if value.grad is not None:
            value.grad = value.grad.clone()


def _saved(update: Update) -> Callable[[], None]:
    """Copy weights, the state of the optimizer, and its groups; returns what puts them back."""
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
