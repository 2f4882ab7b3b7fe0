"""Check that the loss depends only on the model's output, because no worker of a pipeline has the whole model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from paceline.data.feed import MicrobatchGroup
from paceline.errors import InputError
from paceline.partition.preserve import preserved
from paceline.step.forward import ForwardRunner
from paceline.system.torch_internals import tree_leaves, tree_map_only


def check_loss(compute: ForwardRunner, group: MicrobatchGroup) -> None:
    """Raise InputError if the loss uses the model's parameters directly, for example in a weight penalty."""
    with preserved(compute.model):
        with torch.no_grad(), compute.precision():
            output = compute.model(compute.input_of(group))
        output = tree_map_only(torch.Tensor, _detached, output)
        with only_uses(compute.model, dict(compute.model.named_buffers()), "loss"):
            compute.loss_of(group, model=lambda _: output)


@contextmanager
def only_uses(model: nn.Module, allowed: Collection[str], what: str) -> Iterator[None]:
    """Raise InputError at the end of the context if a function in it has used other parameters or buffers.

    Args:
        what: name of the function, for the message.
    """
    uses = _Uses(model)
    with uses:
        yield
    if refused := [name for name in uses.names if name not in allowed]:
        kind = "parameter" if refused[0] in dict(model.named_parameters()) else "buffer"
        raise InputError(
            f"The {what} uses the {kind} {refused[0]!r} of the model, not only its output. The loss of a model that is "
            f"cut is computed with the last stage, without the layers of the others: use the optimizer's weight_decay "
            f"for a weight penalty, or another strategy."
        )


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


class _Uses(TorchFunctionMode):
    """Recorder of the ``names`` of parameters and buffers from which tensors are computed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._tensors = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        self.names: list[str] = []

    def __torch_function__(
        self, function: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        is_use = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result))  # reading a shape is allowed
        if is_use and function is not torch.autograd.grad:
            given = tree_leaves((args, kwargs))
            self.names += [self._tensors[id(leaf)] for leaf in given if id(leaf) in self._tensors]
        return result
