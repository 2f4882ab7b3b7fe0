"""Release of the storage of parameters owned by other stages, with an error for scripts that use these."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from paceline.errors import InputError
from paceline.partition.layers import layer_modules
from paceline.system.torch_internals import count_users, own_parameters, tree_leaves, tree_map_only, without_subclasses

_OWN = str(Path(__file__).resolve().parents[2]) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_RANDOM = {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"}
_ON_ITSELF = {"requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
_ON_ITSELF |= {"get_device", "untyped_storage", "__hash__"}
_CONVERSIONS = {"bfloat16", "cpu", "cuda", "double", "float", "half", "to", "type"}
_VIEWS = {"T", "__getitem__", "data", "detach", "flatten", "mT", "narrow", "permute", "reshape", "select", "squeeze"}
_VIEWS |= {"t", "transpose", "unsqueeze", "view", "view_as"}
_FROM_SHAPE = {"H", "imag", "itemsize", "mH", "nbytes", "ndim", "real", "shape", *_VIEWS}
"""Attributes that depend on the values or the shape. The parameter itself answers for all other ones."""
_KEPT = "_paceline_layout"


class Released:
    """Parameters whose values and optimizer state are on other workers.

    A parameter keeps its storage if another tensor uses it as well: a view that the script holds, or other weights in
    the same storage.

    Args:
        used: names of the parameters that this worker computes with.
        updated: names of the parameters that this worker updates.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, used: Collection[str], updated: Collection[str]) -> None:
        self._optimizer = optimizer
        self._updated_elsewhere = [parameter for name, parameter in model.named_parameters() if name not in updated]
        self._layouts = {
            parameter: (name, parameter.shape, parameter.stride())
            for name, parameter in model.named_parameters()
            if name not in used and type(parameter.data) is torch.Tensor
        }
        self._freed: list[nn.Parameter] = []
        self._is_released = False
        self._modules, self._layers = dict(model.named_modules()), layer_modules(model)
        self._hooks: list[RemovableHandle] = []

    def release(self) -> None:
        """Free the storage and the optimizer state. From now on the script cannot read the values."""
        if self._is_released:
            return
        self._is_released = True
        for parameter in self._updated_elsewhere:
            self._optimizer.state.pop(parameter, None)
        self._freed = [parameter for parameter in self._layouts if _owns_storage(parameter)]
        for parameter in self._freed:
            parameter.data = parameter.new_empty(0)
            if type(parameter) is nn.Parameter:
                setattr(parameter, _KEPT, self._layouts[parameter])
                parameter.__class__ = _Elsewhere
        self._hooks = [module.register_state_dict_pre_hook(_refuse) for module in self._modules.values()]
        freed = {id(parameter) for parameter in self._freed}
        for name, module in self._layers.items():  # the stages' own passes run no layer of another stage
            if any(id(parameter) in freed for parameter in own_parameters(module).values()):
                self._hooks.append(module.register_forward_pre_hook(partial(_refuse_call, name)))

    def allocate(self) -> None:
        """Give the tensors their shapes back, with undefined values."""
        if not self._is_released:
            return
        self._is_released = False
        for hook in self._hooks:
            hook.remove()
        for parameter in self._freed:
            if isinstance(parameter, _Elsewhere):
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]
                delattr(parameter, _KEPT)
            _, shape, stride = self._layouts[parameter]
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
    return count_users(storage) == 2 and storage.nbytes() == parameter.numel() * parameter.element_size()


class _Elsewhere(nn.Parameter):
    """Parameter whose values another worker has.

    For the script it has its shape, type and device. A change in place has no effect here, because the worker that has
    the values makes it, too; but it draws as many random numbers. Reading a value is refused. Paceline and torch's own
    code see a tensor without elements.
    """

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with without_subclasses():
            if not _is_called_by_script():
                return function(*args, **(kwargs or {}))
            return _answer(function, args, dict(kwargs or {}))

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to pickle the parameter, because its values are missing.

        Raises:
            InputError: always.
        """
        raise _refusal((self,), {})


def _is_called_by_script() -> bool:
    """Return whether the code that called torch is not Paceline's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return not frame.f_code.co_filename.startswith(_OWN)


def _answer(  # noqa: PLR0911 - a case for each kind of function
    function: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Return the result of the script's call with a released parameter."""
    accessor = getattr(function, "__name__", "")
    name = getattr(function.__self__, "__name__", "") if accessor in ("__get__", "__set__") else accessor
    first: Any = args[0] if args else kwargs.get("tensor")
    of_parameter = isinstance(first, _Elsewhere)
    if accessor == "__set__":
        return None if name == "data" else function(*args, **kwargs)
    if name in _ON_ITSELF or (accessor == "__get__" and name not in _FROM_SHAPE):
        return function(*args, **kwargs)
    if _changes(name) and of_parameter:
        if name in _RANDOM or getattr(function, "__module__", "") == nn.init.__name__:
            _with_shapes(function, args, kwargs, first.device)
        return first
    if name.endswith("_like") or name.startswith("new_") or (name.endswith("_as") and not of_parameter):
        return _with_shapes(function, args, kwargs, first.device)
    try:
        converted = function(*args, **kwargs) if name in _CONVERSIONS and of_parameter else None
        if converted is first or isinstance(converted, str):
            return converted  # the type and device are these already, or asked for
        result = _with_shapes(function, args, kwargs, torch.device("meta"))
    except Exception:  # noqa: BLE001 - a tensor on the meta device has no values
        raise _refusal(args, kwargs) from None
    if name in _VIEWS and of_parameter and isinstance(result, torch.Tensor):
        view = first.detach().as_subclass(_Elsewhere)
        setattr(view, _KEPT, (getattr(first, _KEPT)[0], result.shape, result.stride()))
        return view
    if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
        raise _refusal(args, kwargs)
    return result


def _changes(name: str) -> bool:
    """Return whether a function of this name changes its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    return name.endswith("_")


def _with_shapes(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], device: torch.device
) -> Any:
    """Call a function with tensors of the right shapes in place of the released parameters."""

    def tensor(value: _Elsewhere) -> torch.Tensor:
        _, shape, stride = getattr(value, _KEPT)
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=device)

    args, kwargs = tree_map_only(_Elsewhere, tensor, (tuple(args), kwargs))
    return function(*args, **kwargs)


def _refusal(args: Sequence[Any], kwargs: dict[str, Any]) -> InputError:
    names: list[str] = []
    tree_map_only(_Elsewhere, lambda value: names.append(getattr(value, _KEPT)[0]), (tuple(args), kwargs))
    return InputError(
        f"The script reads the parameter {names[0]!r}, which another worker has: in a pipeline a worker has the "
        f"weights of its own stages only. In the loop, call session.model_state() on every worker, which returns all "
        f"of them. In the loss, use the weight_decay of the optimizer for a penalty, or strategy 'allreduce'."
    )
