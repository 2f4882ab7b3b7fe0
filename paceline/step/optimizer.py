"""The update of the model from averaged gradients: clipping, learning rate, optimizer, schedule."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline import fault_points
from paceline.data.keys import generator_states, same_states
from paceline.errors import ConfigError, InputError
from paceline.settings import Settings

_NO_CLOSURE = inspect.Parameter("closure", inspect.Parameter.KEYWORD_ONLY, default=None)


@dataclass(frozen=True)
class Scaling:
    """By how much the learning rate is larger than the script's, and over how many steps it gets there.

    ``linear``: in proportion to the batch, with a warm-up (Goyal et al. 2017, arXiv 1706.02677); ``sqrt``: with the
    square root of the batch (Krizhevsky 2014, arXiv 1404.5997).
    """

    factor: float = 1.0
    warmup_steps: int = 0
    reason: str = ""

    def at(self, step: int) -> float:
        """The factor of a step, counted from 0."""
        if step >= self.warmup_steps:
            return self.factor
        return 1.0 + (self.factor - 1.0) * (step + 1) / self.warmup_steps


def scaling_of(settings: Settings, workers: int) -> Scaling:
    """The scaling that the settings ask for, with the reason in words.

    Raises:
        ConfigError: a scaling or a warm-up without a batch that grows with the workers.
    """
    if settings.scale_lr is None:
        if settings.warmup_steps:
            raise ConfigError(
                f"warmup_steps = {settings.warmup_steps} needs scale_lr ('linear' or 'sqrt'): it is the way from the "
                f"base learning rate up to the scaled one. For another warm-up give a schedule."
            )
        return Scaling()
    if settings.batch_per_worker is None:
        raise ConfigError(
            f"scale_lr = {settings.scale_lr!r} needs batch_per_worker: with batch= the batch, and so the learning "
            f"rate, stays the same for any number of workers."
        )
    factor = float(workers) if settings.scale_lr == "linear" else math.sqrt(workers)
    per_worker = settings.batch_per_worker
    reason = (
        f"learning rate x {factor:g} ({settings.scale_lr}): the batch is {workers} workers x {per_worker} = "
        f"{workers * per_worker} samples"
    )
    if settings.warmup_steps:
        reason += f"; reached over the first {settings.warmup_steps} steps"
    return Scaling(factor, settings.warmup_steps, reason)


class Update:
    """Applies gradients to the parameters.

    Args:
        model: the model; all its parameters that require a gradient are trained.
        optimizer: a factory, called with those parameters.
        schedule: a factory, called with the optimizer, or none.
        clip_norm: the largest global norm of the gradients, or none.
        scaling: of the learning rate.

    Attributes:
        drew: whether the first update that was made here drew random numbers.

    Raises:
        InputError: the optimizer or the schedule is not a factory of one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[..., Optimizer],
        schedule: Callable[[Optimizer], LRScheduler] | None,
        clip_norm: float | None,
        scaling: Scaling,
    ) -> None:
        self.parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self._frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
        self.scaling = scaling
        self.drew: bool | None = None
        self._clip_norm = clip_norm
        if not self.parameters:
            raise InputError("No parameter of the model requires a gradient: there is nothing to train.")
        self.optimizer = _made(optimizer, list(self.parameters.values()))
        self._check_owned()
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * scaling.factor
        self.schedule = None if schedule is None else _scheduled(schedule, self.optimizer)

    def _check_owned(self) -> None:
        """Refuse an optimizer with parameters that are not the model's: nobody would average or save them."""
        owned = {id(value) for value in self.parameters.values()}
        for group in self.optimizer.param_groups:
            for value in group["params"]:
                if id(value) not in owned:
                    raise InputError(
                        f"The optimizer has a parameter of shape {list(value.shape)} that is not one of the model's "
                        f"trainable ones. Put a loss's parameters into the model, and use forward(model, microbatch)."
                    )

    def copied(self, names: Container[str]) -> Update:
        """An update of copies of some parameters, for another thread; its optimizer and schedule begin without a state.

        Args:
            names: of the parameters. The others are empty there, and get no gradient.

        Raises:
            InputError: the optimizer or the schedule has something that cannot be copied.
        """
        made = copy.copy(self)
        made.parameters = {
            name: nn.Parameter(torch.empty_like(value) if name in names else value.new_empty(0))
            for name, value in self.parameters.items()
        }
        made.drew, made._frozen = False, {}
        memo: dict[int, Any] = {id(value): made.parameters[name] for name, value in self.parameters.items()}
        memo[id(self.optimizer.state)] = defaultdict(dict)
        made.optimizer = memo[id(self.optimizer)] = object.__new__(type(self.optimizer))
        try:
            for key, value in vars(self.optimizer).items():
                if key != "step":  # a schedule has put it there, bound to the original
                    setattr(made.optimizer, key, copy.deepcopy(value, memo))
            made.schedule = copy.deepcopy(self.schedule, memo)
        except (TypeError, RuntimeError) as error:
            raise InputError(
                f"{type(self.optimizer).__name__} or its schedule cannot be copied, as servers on several machines "
                f"need it: {error}."
            ) from error
        if made.schedule is not None:
            step: Any = partial(type(made.optimizer).step, made.optimizer)
            step._wrapped_by_lr_sched = made.optimizer._opt_called = True  # type: ignore[attr-defined]
            made.optimizer.step = step  # type: ignore[method-assign]
        return made

    def check_frozen(self) -> None:
        """Refuse a parameter that was frozen at the start and requires a gradient now.

        Raises:
            InputError: names it.
        """
        for name, value in self._frozen.items():
            if value.requires_grad:
                raise InputError(
                    f"The parameter {name!r} was frozen at the start and requires a gradient now. Leave it trainable "
                    f"from the start (with a learning rate of 0 in a group of its own), or start a new session."
                )

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first parameter group for a step far beyond the warm-up."""
        return float(self.optimizer.param_groups[0]["lr"])

    def apply(
        self,
        step: int,
        factor: float = 1.0,
        norm: torch.Tensor | None = None,
        here: bool = True,
        made: Callable[[], None] | None = None,
    ) -> tuple[torch.Tensor, float]:
        """Update the parameters from their ``.grad``; returns the gradients' global norm and the learning rate used.

        Args:
            step: how many updates there were before; for the warm-up.
            factor: of the learning rate of this update.
            norm: the global norm before clipping, where ``.grad`` holds a part of the gradients only.
            here: whether this worker has a part in the update; else only the schedule goes on.
            made: called at once when the parameters are updated.
        """
        fault_points.reach("between reduction and update", step)
        norm = self.norm() if norm is None else norm
        if self._clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(list(self.parameters.values()), self._clip_norm, norm)
        groups = self.optimizer.param_groups
        full = [group["lr"] for group in groups]
        now = self.scaling.at(step) / self.scaling.factor * factor
        if now != 1.0:
            for group, rate in zip(groups, full, strict=True):
                group["lr"] = rate * now
        used = float(groups[0]["lr"])
        if here:
            self._step()
        if made is not None:
            made()
        for group, rate in zip(groups, full, strict=True):
            group["lr"] = rate
        if here:
            self.advance()
        else:
            self.advance_after(1)
        fault_points.reach("after update", step)
        return norm, used

    def _step(self) -> None:
        """Call the optimizer, and explain what it says about gradients of which some are sparse."""
        before = generator_states() if self.drew is None else None
        try:
            self.optimizer.step()
        except RuntimeError as error:
            sparse = [name for name, one in self.parameters.items() if one.grad is not None and one.grad.is_sparse]
            if not sparse:
                raise
            raise InputError(
                f"{type(self.optimizer).__name__} cannot make the update, in which the parameter {sparse[0]!r} has a "
                f"sparse gradient: {error}. Of torch's optimizers SGD and Adagrad take sparse gradients and dense "
                f"ones, SparseAdam only sparse ones; or use sparse=False."
            ) from error
        if before is not None:
            self.drew = not same_states(before, generator_states())

    def norm(self, without: Container[int] = ()) -> torch.Tensor:
        """The global 2-norm of the gradients, a scalar tensor; ``without`` those of the parameters at these places."""
        gradients = [
            _elements(value.grad)
            for place, value in enumerate(self.parameters.values())
            if value.grad is not None and place not in without
        ]
        if not gradients:
            return torch.zeros((), device=next(iter(self.parameters.values())).device)
        norms = torch._foreach_norm(gradients)
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return total

    def advance(self) -> None:
        """Let the schedule go one step on."""
        if self.schedule is not None:
            self.schedule.step()

    def advance_after(self, updates: int) -> None:
        """Let the schedule go on after so many updates of other workers."""
        if self.schedule is None:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch misses an update by this worker's own optimizer
            for _ in range(updates):
                self.schedule.step()


def _elements(gradient: torch.Tensor) -> torch.Tensor:
    """All elements that need not be zero."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _made(optimizer: Callable[..., Optimizer], parameters: list[nn.Parameter]) -> Optimizer:
    if isinstance(optimizer, Optimizer) or not callable(optimizer):
        raise InputError(
            f"optimizer must be a factory, something that is called with the parameters, but it is "
            f"{_kind(optimizer)}. Write, for example, optimizer=partial(torch.optim.AdamW, lr=3e-4)."
        )
    try:
        made: Any = optimizer(parameters)
    except TypeError as error:
        raise InputError(f"The optimizer factory could not be called with the parameters: {error}.") from error
    if not isinstance(made, Optimizer):
        raise InputError(f"The optimizer factory must return a torch optimizer, but it returned {_kind(made)}.")
    if inspect.signature(made.step).parameters.get("closure", _NO_CLOSURE).default is inspect.Parameter.empty:
        raise InputError(
            f"{type(made).__name__} computes the loss several times in each step (it needs a closure), which cannot be "
            f"done by many workers here. Use an optimizer whose step() takes nothing, such as torch.optim.AdamW."
        )
    return made


def _scheduled(schedule: Callable[[Optimizer], LRScheduler], optimizer: Optimizer) -> LRScheduler:
    if isinstance(schedule, LRScheduler) or not callable(schedule):
        raise InputError(
            f"schedule must be a factory, something that is called with the optimizer, but it is {_kind(schedule)}. "
            f"Write, for example, schedule=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=1000)."
        )
    made: Any = schedule(optimizer)
    if not isinstance(made, LRScheduler):
        raise InputError(f"The schedule factory must return a torch LRScheduler, but it returned {_kind(made)}.")
    return made


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
