"""The parameters that only other workers compute with: no memory is kept for them while training goes on."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.optim import Optimizer


class Released:
    """Parameters without their values, and without their state in the optimizer.

    A parameter keeps its memory if another tensor uses it as well: a view that somebody holds, or other weights that
    lie in one piece with it.

    Args:
        model: has all parameters.
        optimizer: the model's.
        used: the names of the parameters that this worker computes with.
        updated: the names of those that it updates.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, used: Collection[str], updated: Collection[str]) -> None:
        self._optimizer = optimizer
        self._updated_elsewhere = [parameter for name, parameter in model.named_parameters() if name not in updated]
        self._layouts = {
            parameter: (parameter.shape, parameter.stride())
            for name, parameter in model.named_parameters()
            if name not in used and type(parameter.data) is torch.Tensor
        }
        self._released: list[nn.Parameter] = []
        self._there = True

    def release(self) -> None:
        """Let go of the values: the tensors have no elements then."""
        if not self._there:
            return
        self._there = False
        for parameter in self._updated_elsewhere:
            self._optimizer.state.pop(parameter, None)
        self._released = [parameter for parameter in self._layouts if _is_alone(parameter)]
        for parameter in self._released:
            parameter.data = parameter.new_empty(0)

    def make_room(self) -> None:
        """Give the tensors their shapes again, with any values."""
        if self._there:
            return
        self._there = True
        for parameter in self._released:
            shape, stride = self._layouts[parameter]
            parameter.data = parameter.new_empty_strided(shape, stride)


def _is_alone(parameter: nn.Parameter) -> bool:
    """Whether no other tensor uses the memory of a parameter, and the parameter uses all of it."""
    memory = parameter.untyped_storage()
    users: int = torch._C._storage_Use_Count(memory._cdata)  # this object is one, too
    return users == 2 and memory.nbytes() == parameter.numel() * parameter.element_size()
