"""``TorchState``: elastic state of models, optimizers, schedulers, samplers and plain objects."""

from __future__ import annotations

import copy
from typing import Any

import torch

from paceline.horovod.common.elastic import ObjectState
from paceline.horovod.runtime import rank
from paceline.horovod.torch.elastic.sampler import ElasticSampler
from paceline.horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class StateHandler:
    """Handler that saves, restores and synchronizes one attribute by its ``state_dict``."""

    def __init__(self, value: Any) -> None:
        self.set_value(value)

    def save(self) -> None:
        """Save a copy of the value's state."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Restore the saved copy."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Replace the value's state by that of rank 0."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))

    def set_value(self, value: Any) -> None:
        """Handle another object, and save its state."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Handler of a model."""

    def sync(self) -> None:
        """Replace parameters and buffers by those of rank 0."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateHandler):
    """Handler of an optimizer."""

    def sync(self) -> None:
        """Replace the state and the options by those of rank 0."""
        broadcast_optimizer_state(self.value, root_rank=0)


class LRSchedulerStateHandler(StateHandler):
    """Handler of a learning-rate scheduler."""


class SamplerStateHandler(StateHandler):
    """Handler of a sampler."""


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, LRSchedulerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return the handlers by type. The first matching type is used."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the handlers used by states that are created afterwards."""
    global _registry
    _registry = registry


class TorchState(ObjectState):
    """State of a training script: a model, an optimizer, and further objects by name.

    Args:
        model: model, if any.
        optimizer: optimizer, if any.
        kwargs: more models, optimizers, schedulers, an :class:`ElasticSampler`, and plain objects. Each becomes an
            attribute of the state.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        given = {**kwargs, "model": model, "optimizer": optimizer}
        self._handlers: dict[str, StateHandler] = {}
        for name, value in given.items():
            kind = next((handler for known, handler in _registry if isinstance(value, known)), None)
            if kind is not None:
                self._handlers[name] = kind(value)
                object.__setattr__(self, name, value)
        plain = {name: value for name, value in given.items() if name not in self._handlers}
        super().__init__(broadcast_object, rank, **plain)

    def save(self) -> None:
        """Save copies of all attributes."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Restore the saved copies."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Replace all attributes by those of rank 0, and save copies."""
        for handler in self._handlers.values():
            handler.sync()
            handler.save()
        super().sync()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_handlers", {}):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)
