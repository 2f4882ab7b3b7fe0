"""What a loss may depend on where each worker has some stages of the model only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.data.feed import Piece
from paceline.data.keys import kept_states
from paceline.errors import InputError
from paceline.partition.preserve import untouched
from paceline.step.forward import Compute, pair_of


def check_loss(compute: Compute, piece: Piece) -> None:
    """Refuse a loss that uses parameters of the model by itself, such as a penalty on weights.

    Raises:
        InputError: names one of them.
    """
    noting = _Noting(compute.model)
    with untouched(compute.model), kept_states(), compute.precision():
        with torch.no_grad():
            output = compute.model(pair_of(piece.data)[0])
        output = tree_map_only(torch.Tensor, _alone, output)

        def given(features: Any) -> Any:
            return output

        with noting:
            compute.forward(cast(nn.Module, given), piece.data)
    if noting.used:
        raise InputError(
            f"The loss uses the parameter {noting.used[0]!r} of the model, not only the model's output. A model that "
            f"is cut has its loss where its last stage is, without the parameters of the others: use weight_decay of "
            f"the optimizer for a penalty on weights, or another strategy."
        )


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


class _Noting(TorchFunctionMode):
    """Notes the parameters from which tensors are computed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.used: list[str] = []

    def __torch_function__(
        self, function: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(made)):  # its shape or device may be asked for
            given = tree_leaves((args, kwargs))
            self.used += [self._names[id(leaf)] for leaf in given if id(leaf) in self._names]
        return made
