"""How an optimizer wants to be called."""

from __future__ import annotations

import inspect

from torch.optim import Optimizer

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
