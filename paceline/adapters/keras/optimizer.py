"""Keras optimizer as a torch optimizer, with a state for each parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.adapters.keras.kinds import is_keras
from paceline.adapters.keras.module import KerasModule
from paceline.errors import InputError


def adapted(made: Any, model: nn.Module) -> Any:
    """Return a torch optimizer for a Keras optimizer. Return other optimizers unchanged."""
    if not is_keras(made, "BaseOptimizer"):
        return made
    kind = type(made).__name__
    if not isinstance(model, KerasModule):
        raise InputError(
            f"{kind} of Keras updates the variables of a Keras model, but the model is a {type(model).__name__}: use "
            f"an optimizer of torch."
        )
    if is_keras(made, "LossScaleOptimizer"):
        raise InputError("LossScaleOptimizer of Keras scales the loss, which a session computes: use its inner one.")
    return KerasOptimizer(made, model)


class KerasOptimizer(Optimizer):
    """Torch optimizer that updates with a Keras optimizer. Its state shares memory with the slot variables.

    The learning rate is that of the parameter group, unless the Keras optimizer has its own schedule.

    Args:
        optimizer: new Keras optimizer.
        module: module of the model that the optimizer trains.
    """

    def __init__(self, optimizer: Any, module: KerasModule) -> None:
        self._optimizer = optimizer
        self._variables = list(module.keras_model.trainable_weights)
        self._slots: list[dict[str, Any]] = [{} for _ in self._variables]
        _recording(optimizer, self._variables, self._slots)
        self._scheduled = not isinstance(optimizer._learning_rate, type(optimizer.iterations))
        super().__init__([one.value for one in self._variables], {"lr": self._rate()})
        self._show()

    def _rate(self) -> float:
        return float(self._optimizer.learning_rate)

    def _show(self) -> None:
        """Set the torch state of each parameter to the step count and the slot variables."""
        steps = torch.tensor(float(self._optimizer.iterations.value))
        for variable, slots in zip(self._variables, self._slots, strict=True):
            shown = {name: slot.value for name, slot in slots.items()}
            self.state[variable.value] = {"step": steps.clone(), **shown}

    def _take(self) -> None:
        """Copy a loaded state and a changed learning rate to the Keras optimizer."""
        for variable, slots in zip(self._variables, self._slots, strict=True):
            state = self.state[variable.value]
            for name, slot in slots.items():
                if name in state and state[name] is not slot.value:
                    slot.assign(state[name])
        first = self.state[self._variables[0].value]
        if "step" in first and int(first["step"]) != int(self._optimizer.iterations.value):
            self._optimizer.iterations.assign(int(first["step"]))
        if not self._scheduled and self.param_groups[0]["lr"] != self._rate():
            self._optimizer.learning_rate = self.param_groups[0]["lr"]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the variables that have a gradient."""
        assert closure is None
        self._take()
        if self._scheduled and self.param_groups[0]["lr"] != self._rate():
            raise InputError(
                f"{type(self._optimizer).__name__} of Keras has a learning-rate schedule of its own, so scale_lr, "
                f"warmup_steps and schedule= would have no effect: give it a number, or leave them out."
            )
        ready = [one for one in self._variables if one.value.grad is not None]
        self._optimizer.apply([one.value.grad for one in ready], ready)
        if self._scheduled:
            self.param_groups[0]["lr"] = self._rate()
        self._show()

    def __deepcopy__(self, memo: dict[int, Any]) -> KerasOptimizer:
        raise TypeError("an optimizer of Keras belongs to the variables of its model")


def _recording(optimizer: Any, variables: list[Any], slots: list[dict[str, Any]]) -> None:
    """Build the optimizer, and record in ``slots`` the variables that it creates for each variable of the model."""
    kind = type(optimizer).__name__
    if optimizer.built:
        raise InputError(f"{kind} has been used before: let the factory make a new one.")
    if optimizer.gradient_accumulation_steps:
        raise InputError(f"{kind} has gradient_accumulation_steps: set batch and microbatches of the session instead.")
    places = {id(one): place for place, one in enumerate(variables)}
    make = optimizer.add_variable_from_reference

    def make_slot(reference_variable: Any, name: str | None = None, *rest: Any, **more: Any) -> Any:
        made = make(reference_variable, name, *rest, **more)
        place = places[id(reference_variable)]
        slots[place][name or f"slot {len(slots[place])}"] = made
        return made

    optimizer.add_variable_from_reference = make_slot
    try:
        optimizer.build(variables)
    finally:
        del optimizer.add_variable_from_reference
    slot_variables = [one for slot in slots for one in slot.values()]
    known = {id(one) for one in (*variables, *slot_variables, optimizer.iterations, optimizer._learning_rate)}
    held = [one for value in vars(optimizer).values() for one in (value if isinstance(value, list) else [value])]
    if any(is_keras(one, "Variable") and id(one) not in known for one in held):
        raise InputError(
            f"{kind} of Keras has a state that belongs to no parameter, or lacks the shape of its parameter, and "
            f"cannot be saved: use another optimizer, or one of torch."
        )
