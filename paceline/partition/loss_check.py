"""Check that the loss depends only on the model's output, because no worker of a pipeline has the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from paceline.data.feed import MicrobatchGroup
from paceline.errors import InputError
from paceline.partition.preserve import preserved
from paceline.step.forward import ForwardRunner
from paceline.step.loss import pair_of
from paceline.system.torch_internals import tree_leaves, tree_map_only


def check_loss(compute: ForwardRunner, group: MicrobatchGroup) -> None:
    """Raise InputError if the loss uses the model's parameters directly, for example in a weight penalty."""
    uses = _ParameterUses(compute.model)
    with preserved(compute.model), compute.precision():
        with torch.no_grad():
            output = compute.model(pair_of(group.data)[0])
        output = tree_map_only(torch.Tensor, _detached, output)
        with uses:
            value = compute.forward(cast(nn.Module, lambda _: output), group.data)
    compute.take(value, group.samples)
    if uses.names:
        raise InputError(
            f"The loss uses the parameter {uses.names[0]!r} of the model, not only its output. The loss of a "
            f"model that is cut is computed with the last stage, without the parameters of the others: use the "
            f"optimizer's weight_decay for a weight penalty, or another strategy."
        )


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


class _ParameterUses(TorchFunctionMode):
    """Recorder of the ``names`` of parameters from which tensors are computed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self.names: list[str] = []

    def __torch_function__(
        self, function: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):  # reading a shape is allowed
            given = tree_leaves((args, kwargs))
            self.names += [self._parameters[id(leaf)] for leaf in given if id(leaf) in self._parameters]
        return result
