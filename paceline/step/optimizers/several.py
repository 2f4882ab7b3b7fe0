"""Several optimizers with separate parameters, combined into one optimizer, and their schedules.

::

    other code sees    groups 0 to 3 | one state | step()
    Muon               groups 0, 1       matrices
    AdamW              groups 2, 3       the rest

So checkpoints, joiners, servers and pipelines deal with a single optimizer.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.system.torch_internals import mark_scheduled


class SeveralOptimizers(Optimizer):
    """Optimizer that combines several optimizers: the parameter groups of all of them, and one shared state."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self.optimizers = dict(optimizers)
        self.defaults = {}
        self.state = defaultdict(dict)
        for one in self.optimizers.values():
            share_state(one, self.state)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of all optimizers, in the order of the optimizers."""
        return [group for one in self.optimizers.values() for group in one.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for one in self.optimizers.values():
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of each optimizer's parameters."""
        for one in self.optimizers.values():
            one.zero_grad(set_to_none)


class SeveralSchedules(LRScheduler):
    """Schedules of several optimizers."""

    def __init__(self, schedules: Mapping[str, LRScheduler]) -> None:
        self.schedules = dict(schedules)

    def step(self, epoch: int | None = None) -> None:
        """Advance each schedule by a step."""
        assert epoch is None
        for one in self.schedules.values():
            one.step()

    def state_dict(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self.schedules.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict` of the same schedules."""
        for name, one in self.schedules.items():
            one.load_state_dict(state_dict[name])


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that an optimizer combines, or the optimizer itself."""
    return [*optimizer.optimizers.values()] if isinstance(optimizer, SeveralOptimizers) else [optimizer]


def kind_of(optimizer: Optimizer) -> str:
    """Return the class name of an optimizer, or the names and classes of the optimizers that it combines."""
    if not isinstance(optimizer, SeveralOptimizers):
        return type(optimizer).__name__
    return ", ".join(f"{name}: {type(one).__name__}" for name, one in optimizer.optimizers.items())


def with_wrapped(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer and the optimizers that it wraps, as SAM wraps its base optimizer."""
    return [optimizer, *(inner for inner in vars(optimizer).values() if isinstance(inner, Optimizer))]


def share_state(optimizer: Optimizer, state: defaultdict[Any, Any]) -> None:
    """Make an optimizer, and the optimizers that it wraps, keep their state in ``state``.

    Otherwise the state of a wrapped optimizer would not be saved.
    """
    for one in with_wrapped(optimizer):
        if one.state is not state:
            for parameter, values in one.state.items():
                state[parameter].update(values)
            one.state = state


def copied(
    optimizer: Optimizer, schedule: LRScheduler | None, memo: dict[int, Any]
) -> tuple[Optimizer, LRScheduler | None]:
    """Copy an optimizer and its schedule.

    Args:
        memo: replacements by object id, as for ``copy.deepcopy``: for parameters, and for the state.

    Raises:
        TypeError, RuntimeError: an object in the optimizer or the schedule cannot be copied.
    """
    parts = parts_of(optimizer)
    for one in parts:
        memo[id(one)] = object.__new__(type(one))
    for one in parts:
        for key, value in vars(one).items():
            if key != "step":  # set by a schedule, and bound to the original optimizer
                setattr(memo[id(one)], key, copy.deepcopy(value, memo))
    schedules: LRScheduler | None = copy.deepcopy(schedule, memo)
    if isinstance(optimizer, SeveralOptimizers):
        made = {name: memo[id(one)] for name, one in optimizer.optimizers.items()}
        scheduled = [made[name] for name in schedule.schedules] if isinstance(schedule, SeveralSchedules) else []
        memo[id(optimizer)] = SeveralOptimizers(made)
    else:
        scheduled = [memo[id(optimizer)]] if schedule is not None else []
    for one in scheduled:
        step: Any = partial(type(one).step, one)
        mark_scheduled(one, step)
        one.step = step
    return memo[id(optimizer)], schedules
