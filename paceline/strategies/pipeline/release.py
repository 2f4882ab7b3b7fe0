"""Release of the storage of parameters owned by other stages, with an error for scripts that use these."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from paceline.errors import InputError


class Released:
    """Parameters whose values and optimizer state are on other workers.

    A parameter keeps its storage if another tensor uses it as well: a view that the script holds, or other weights in
    the same storage.

    Args:
        model: whole model.
        optimizer: optimizer of the model.
        used: names of the parameters that this worker computes with.
        updated: names of the parameters that this worker updates.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, used: Collection[str], updated: Collection[str]) -> None:
        self._optimizer = optimizer
        self._updated_elsewhere = [parameter for name, parameter in model.named_parameters() if name not in updated]
        self._layouts = {
            parameter: (parameter.shape, parameter.stride())
            for name, parameter in model.named_parameters()
            if name not in used and type(parameter.data) is torch.Tensor
        }
        self._freed: list[nn.Parameter] = []
        self._is_released = False
        self._modules = dict(model.named_modules())
        self._hooks: list[RemovableHandle] = []

    def release(self) -> None:
        """Free the storage and the optimizer state, which leaves the tensors without elements."""
        if self._is_released:
            return
        self._is_released = True
        for parameter in self._updated_elsewhere:
            self._optimizer.state.pop(parameter, None)
        self._freed = [parameter for parameter in self._layouts if _owns_storage(parameter)]
        for parameter in self._freed:
            parameter.data = parameter.new_empty(0)
        self._hooks = [module.register_state_dict_pre_hook(_refuse) for module in self._modules.values()]
        freed = {id(parameter) for parameter in self._freed}
        for name, module in self._modules.items():  # the stages' own passes run no layer of another stage
            if any(id(parameter) in freed for parameter in module._parameters.values()):
                self._hooks.append(module.register_forward_pre_hook(partial(_refuse_call, name)))

    def allocate(self) -> None:
        """Give the tensors their shapes back, with undefined values."""
        if not self._is_released:
            return
        self._is_released = False
        for hook in self._hooks:
            hook.remove()
        for parameter in self._freed:
            shape, stride = self._layouts[parameter]
            parameter.data = parameter.new_empty_strided(shape, stride)


def _refuse(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise InputError(
        f"{type(module).__name__}.state_dict() was called between two steps of a pipeline, when this worker has the "
        f"weights of its own stages only. Call session.model_state() on every worker, which returns all of them, or "
        f"session.export(path), which writes them."
    )


def _refuse_call(name: str, module: nn.Module, inputs: object) -> None:
    raise InputError(
        f"The layer {name!r} ({type(module).__name__}) was called between two steps of a pipeline, when this worker "
        f"has the weights of its own stages only. Measure with session.evaluate(...), or call the model after the "
        f"loop, when each worker has all weights."
    )


def _owns_storage(parameter: nn.Parameter) -> bool:
    """Return whether a parameter uses all of its storage and no other tensor does."""
    storage = parameter.untyped_storage()
    users: int = torch._C._storage_Use_Count(storage._cdata)  # ``storage`` counts as a user, too
    return users == 2 and storage.nbytes() == parameter.numel() * parameter.element_size()
