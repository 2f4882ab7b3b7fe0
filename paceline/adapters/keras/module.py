"""Keras model as an ``nn.Module`` whose parameters are trained and whose buffers are not.

To torch, a Keras model has only parameters. Untrained weights, such as the statistics of a batch norm, are parameters
that require no gradient. Whether the model trains is an argument of its call, not a mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.adapters.keras.kinds import is_keras
from paceline.errors import InputError
from paceline.system.torch_internals import apply_to_tensors, called_by_torch, own_buffers


def adapted(model: Any) -> Any:
    """Return a module that trains a Keras model. Return other models unchanged."""
    if not is_keras(model, "Layer"):
        return model
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{type(model).__name__} is a Keras model on another back end than torch: set KERAS_BACKEND=torch before "
            f"keras is imported."
        )
    if not getattr(model, "built", False) or not model.weights:
        raise InputError(
            f"The Keras model {model.name!r} has no weights yet: give it a keras.Input, or call model.build(shape), "
            f"before paceline.start."
        )
    return KerasModule(model)


@called_by_torch
class KerasModule(nn.Module):
    """Module that calls a Keras model with ``training`` set by the mode of this module.

    Parameters and buffers are named by the paths of the Keras variables and share memory with them.

    Raises:
        InputError: two weights of the model have the same path.
    """

    keras_model: Any  # the Keras model. Attributes that this module lacks are looked up in it.

    def __init__(self, model: Any) -> None:
        super().__init__()
        names = [_name(variable) for variable in model.weights]
        if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
            raise InputError(f"Two weights of the Keras model have the path {twice!r}: give their layers other names.")
        object.__setattr__(self, "keras_model", model)  # not a submodule, which would add its parameters again
        for variable in model.trainable_weights:
            self.register_parameter(_name(variable), variable.value)
        for variable in model.non_trainable_weights:
            self.register_buffer(_name(variable), variable.value)
        self._seeds = [seed.state for layer in _layers(model) for seed in getattr(layer, "_seed_generators", ())]

    def forward(self, *inputs: Any, training: bool | None = None, **named: Any) -> Any:
        """Call the model. In training, torch's generator draws its layers' seeds, so each microbatch has its own."""
        training = self.training if training is None else training
        if training:
            for seed in self._seeds:
                seed.value.data.copy_(torch.randint(1 << 31, tuple(seed.shape)))
        return self.keras_model(*inputs, training=training, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.keras_model, name)

    def apply_to_tensors(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> KerasModule:
        """Apply ``fn`` in place, because the Keras variables hold the same tensors."""
        kept = dict(own_buffers(self))
        apply_to_tensors(self, fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in kept.items():
            moved = own_buffers(self)[name]
            if tensor is not None and moved is not None and moved is not tensor:
                tensor.data = moved.data
                own_buffers(self)[name] = tensor
        return self


def _name(variable: Any) -> str:
    return str(variable.path).replace(".", "_")


def _layers(model: Any) -> list[Any]:
    return list(model._flatten_layers()) if hasattr(model, "_flatten_layers") else [model]
