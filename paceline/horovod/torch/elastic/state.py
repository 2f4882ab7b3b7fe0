"""``TorchState``: models, optimizers, schedulers and samplers beside plain objects."""

from __future__ import annotations

import copy
from typing import Any

import torch

from paceline.horovod.common.elastic import ObjectState
from paceline.horovod.runtime import rank
from paceline.horovod.torch.elastic.sampler import ElasticSampler
from paceline.horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class StateHandler:
    """How one attribute is saved, restored and synchronized: by its ``state_dict``.

    Args:
        value: the attribute.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Keep a copy of its state."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Go back to the copy."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Take the state of rank 0."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))

    def set_value(self, value: Any) -> None:
        """Handle another object from now on."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Of a model."""

    def sync(self) -> None:
        """Take the parameters and buffers of rank 0."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateHandler):
    """Of an optimizer."""

    def sync(self) -> None:
        """Take the state and the options of rank 0."""
        broadcast_optimizer_state(self.value, root_rank=0)


class LRSchedulerStateHandler(StateHandler):
    """Of a scheduler of learning rates."""


class SamplerStateHandler(StateHandler):
    """Of a sampler."""


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, LRSchedulerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """The handlers by type; the first that fits is taken."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the handlers for states that are made from now on."""
    global _registry
    _registry = registry


class TorchState(ObjectState):
    """The state of a training script: a model, an optimizer, and whatever else is given by name.

    Args:
        model: if there is one.
        optimizer: if there is one.
        kwargs: more models, optimizers, schedulers, an :class:`ElasticSampler`, and plain objects; each is an
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
        """Keep copies of everything."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Go back to the copies."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Take everything of rank 0, and keep a copy."""
        for handler in self._handlers.values():
            handler.sync()
            handler.save()
        super().sync()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_handlers", {}):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)
