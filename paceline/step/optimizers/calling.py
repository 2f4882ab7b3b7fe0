"""How an optimizer wants to be called: with a closure, or with its weights for training or evaluation."""

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
    """The classes of its parts whose ``step`` needs a closure.

    It does if it has a parameter ``closure`` without a default, as LBFGS; if the optimizer has the methods
    ``first_step`` and ``second_step``, as SAM; or if an attribute ``needs_closure`` says so.
    """
    return [type(one).__name__ for one in parts_of(optimizer) if _needs_closure(one)]


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    required = closure is not None and closure.default is inspect.Parameter.empty
    twice = hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step")
    return required or twice or bool(getattr(optimizer, "needs_closure", False))


def with_modes(optimizer: Optimizer) -> list[Any]:
    """Those of its parts that have the methods ``train`` and ``eval``, as schedule-free ones (arXiv 2405.15682)."""
    return [
        one
        for one in parts_of(optimizer)
        if callable(getattr(one, "train", None)) and callable(getattr(one, "eval", None))
    ]


def begin_training(optimizer: Optimizer) -> None:
    """Tell it to train, if it wants to know."""
    for one in with_modes(optimizer):
        one.train()


def check_modes(optimizer: Optimizer, strategy: str, *, able: bool) -> None:
    """Refuse an optimizer that is told to evaluate where not every worker has all of its state.

    Raises:
        ConfigError: the strategy leaves it on some of them only.
    """
    if with_modes(optimizer) and not able:
        raise ConfigError(
            f"{type(with_modes(optimizer)[0]).__name__} has other weights for evaluation (it has train() and eval()), "
            f"and needs its whole state on each worker, which strategy {strategy!r} does not give: use 'allreduce'."
        )


@contextmanager
def evaluating(optimizer: Optimizer) -> Iterator[None]:
    """In which the parameters have the values for evaluation; then again, to the bit, those for training."""
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
