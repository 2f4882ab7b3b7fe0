"""Calling conventions of optimizers: closures, and separate weights for training and evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.errors import ConfigError
from paceline.step.optimizers.several import parts_of


def closure_users(optimizer: Optimizer) -> list[str]:
    """Return the class names of the optimizers whose ``step`` needs a closure.

    An optimizer needs a closure if its ``step`` has a parameter ``closure`` without a default, as LBFGS; if it has the
    methods ``first_step`` and ``second_step``, as SAM; or if its attribute ``needs_closure`` is true.
    """
    return [type(one).__name__ for one in parts_of(optimizer) if _needs_closure(one)]


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    required = closure is not None and closure.default is inspect.Parameter.empty
    twice = hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step")
    return required or twice or bool(getattr(optimizer, "needs_closure", False))


def with_modes(optimizer: Optimizer) -> list[Any]:
    """Return the optimizers with methods ``train`` and ``eval``, as schedule-free optimizers (arXiv 2405.15682)."""
    return [
        one
        for one in parts_of(optimizer)
        if callable(getattr(one, "train", None)) and callable(getattr(one, "eval", None))
    ]


def begin_training(optimizer: Optimizer) -> None:
    for one in with_modes(optimizer):
        one.train()


def check_modes(optimizer: Optimizer, strategy: str, *, able: bool) -> None:
    """Raise if an optimizer has evaluation weights and the strategy does not keep its whole state on every worker."""
    if with_modes(optimizer) and not able:
        raise ConfigError(
            f"{type(with_modes(optimizer)[0]).__name__} has different weights for evaluation (it has train() and "
            f"eval()), and needs its whole state on each worker, which strategy {strategy!r} does not give: use "
            f"'allreduce'."
        )


@contextmanager
def evaluating(optimizer: Optimizer) -> Iterator[None]:
    """Run the body with evaluation weights in the parameters, then restore the training weights bit for bit."""
    told = with_modes(optimizer)
    values = [value for one in told for group in one.param_groups for value in group["params"]]
    kept = [value.detach().clone() for value in values]
    for one in told:
        one.eval()
    try:
        yield
    finally:
        begin_training(optimizer)
        with torch.no_grad():
            for value, before in zip(values, kept, strict=True):
                value.copy_(before)
