"""Factories for the optimizer and the schedule of a script, and checks of what the factories return."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.adapters.keras import optimizer as keras_optimizer
from paceline.errors import InputError
from paceline.step.optimizers.exclusive import check_whole
from paceline.step.optimizers.several import SeveralOptimizers, SeveralSchedules, share_state

OptimizerFactory = Callable[..., Any]
"""Called with the model, (name, parameter) pairs or parameters: its first parameter's name decides which.

It returns an optimizer, or several as a dictionary or in order."""
ScheduleFactory = Callable[[Optimizer], LRScheduler]
_WRITE = "Write, for example, optimizer=partial(torch.optim.AdamW, lr=3e-4)."


def make_optimizer(factory: OptimizerFactory, model: nn.Module) -> Optimizer:
    """Return the optimizer of a model's trainable parameters."""
    if isinstance(factory, Optimizer) or not callable(factory):
        raise InputError(
            f"optimizer must be a factory, something that is called with the parameters, but it is "
            f"{_kind(factory)}. {_WRITE}"
        )
    first = _first_parameter(factory)
    try:
        made: Any = factory(_argument(first, model))
    except TypeError as error:
        given = {"model": "the model", "named_parameters": "pairs of names and parameters"}.get(first, "the parameters")
        raise InputError(f"The optimizer factory could not be called with {given}: {error}. {_WRITE}") from error
    made = keras_optimizer.adapted(made, model)
    if isinstance(made, list | tuple) and all(isinstance(one, Optimizer) for one in made):
        made = {str(place): one for place, one in enumerate(made)}
    if not isinstance(made, dict):
        return _checked(made)
    if not made:
        raise InputError("The optimizer factory returned no optimizer.")
    several = {str(name): _checked(one, str(name)) for name, one in made.items()}
    _check_apart(several, model)
    return SeveralOptimizers(several)


def _first_parameter(factory: OptimizerFactory) -> str:
    try:
        return next(iter(inspect.signature(factory).parameters), "")
    except (TypeError, ValueError):  # a built-in function may have no signature
        return ""


def _argument(first: str, model: nn.Module) -> Any:
    if first == "model":
        return model
    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    return named if first == "named_parameters" else [value for _, value in named]


def _checked(made: Any, name: str = "") -> Optimizer:
    if not isinstance(made, Optimizer):
        what = f"for {name!r} it returned {_kind(made)}" if name else f"it returned {_kind(made)}"
        raise InputError(f"The optimizer factory must return a torch optimizer, or several by name, but {what}.")
    check_whole(made)
    share_state(made, made.state if isinstance(made.state, defaultdict) else defaultdict(dict))
    return made


def _check_apart(several: Mapping[str, Optimizer], model: nn.Module) -> None:
    names = {id(value): name for name, value in model.named_parameters()}
    owners: dict[int, str] = {}
    for owner, one in several.items():
        for value in (value for group in one.param_groups for value in group["params"]):
            before = owners.setdefault(id(value), owner)
            if before != owner:
                raise InputError(
                    f"The parameter {names.get(id(value), 'of another model')!r} is in two optimizers, {before!r} and "
                    f"{owner!r}: give each parameter to one of them."
                )


def make_schedule(schedule: Any, optimizer: Optimizer) -> LRScheduler | None:
    """Return the schedule of an optimizer. Several optimizers share a factory or have a factory for each name."""
    if schedule is None:
        return None
    if not isinstance(optimizer, SeveralOptimizers):
        if isinstance(schedule, dict):
            raise InputError("schedule gives factories by name, but the optimizer factory returned one optimizer.")
        return _scheduled(schedule, optimizer)
    names = list(optimizer.optimizers)
    if isinstance(schedule, list | tuple):
        schedule = {str(place): one for place, one in enumerate(schedule)}
    if not isinstance(schedule, dict):
        schedule = dict.fromkeys(names, schedule)
    if unknown := [name for name in schedule if name not in names]:
        raise InputError(
            f"schedule has a factory for {unknown[0]!r}, but the optimizers are {', '.join(map(repr, names))}."
        )
    made = {name: _scheduled(one, optimizer.optimizers[name]) for name, one in schedule.items() if one is not None}
    return SeveralSchedules(made) if made else None


def _scheduled(schedule: Any, optimizer: Optimizer) -> LRScheduler:
    if isinstance(schedule, LRScheduler) or not callable(schedule):
        raise InputError(
            f"schedule must be a factory, something that is called with the optimizer, but it is {_kind(schedule)}. "
            f"Write, for example, schedule=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=1000)."
        )
    try:
        made: Any = schedule(optimizer)
    except TypeError as error:
        raise InputError(f"The schedule factory could not be called with the optimizer: {error}.") from error
    if not isinstance(made, LRScheduler):
        raise InputError(f"The schedule factory must return a torch LRScheduler, but it returned {_kind(made)}.")
    _check_steps(made)
    return made


def _check_steps(schedule: LRScheduler) -> None:
    """Raise if the ``step`` of a schedule requires an argument, usually a metric."""
    needs = [
        repr(name)
        for name, one in inspect.signature(schedule.step).parameters.items()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if needs:
        raise InputError(
            f"{type(schedule).__name__} cannot be the schedule: its step() needs {' and '.join(needs)}, but "
            f"it is called without arguments, after each update. Use a schedule over the number of updates, such as "
            f"torch.optim.lr_scheduler.CosineAnnealingLR, or LambdaLR with a function of your own; or change the rates "
            f"of session.optimizer between two steps."
        )


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
