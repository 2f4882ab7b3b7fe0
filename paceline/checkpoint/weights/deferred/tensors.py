"""Parameters and buffers without values, which raise an error when their values are used."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.weights.deferred.calls import covers
from paceline.checkpoint.weights.deferred.recorder import Tracked
from paceline.errors import InputError
from paceline.system.torch_internals import CONVERSION_CHECK, tree_leaves, without_subclasses

_ENTRY = "_paceline_deferred"
_OF_SHAPE = {"__hash__", "__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous"}
_OF_SHAPE |= {"is_floating_point", "is_shared", "is_signed", "ndimension", "nelement", "numel", "register_hook"}
_OF_SHAPE |= {"register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size", "storage_offset", "stride"}
_OF_SHAPE |= {"untyped_storage", CONVERSION_CHECK}
_CONVERSIONS = {"bfloat16", "cpu", "cuda", "double", "float", "half", "to", "type"}
_VALUES = {"H", "T", "data", "imag", "mH", "mT", "real"}  # attributes that depend on the values


class Deferred:
    """Storage without values, and the tensors that use it."""

    on_demand = False  # whether to compute the values when they are used, instead of raising an error

    def __init__(self, name: str, tracked: Tracked, tensors: Iterable[torch.Tensor]) -> None:
        self.name, self._tracked = name, tracked
        self._tensors = [weakref.ref(one) for one in tensors]
        for tensor in self.tensors():
            setattr(tensor, _ENTRY, self)
            tensor.__class__ = _DeferredParameter if type(tensor) is nn.Parameter else _DeferredTensor
        tracked.free()

    def tensors(self) -> list[torch.Tensor]:
        return [one for one in (reference() for reference in self._tensors) if one is not None]

    def fill(self) -> None:
        """Compute the values, and turn the tensors into ordinary ones."""
        self._tracked.fill()
        for tensor in self.tensors():
            if deferred_in(tensor) is self:
                self.release(tensor)

    @property
    def digest(self) -> str:
        """Hash of the record of the values. Empty if they were not recorded."""
        return self._tracked.digest

    def is_only(self, tensor: torch.Tensor) -> bool:
        alone = len(self.tensors()) == 1 and not self._tracked.is_filled
        return alone and not tensor.storage_offset() and covers(tensor, self._tracked.memory.nbytes)

    def write(self, target: torch.Tensor) -> None:
        """Write the values into a tensor of the same layout. The tensors of this storage stay without values."""
        self._tracked.write(target.untyped_storage())

    def release(self, tensor: torch.Tensor) -> None:
        """Turn a tensor into an ordinary one."""
        tensor.__class__ = nn.Parameter if isinstance(tensor, _DeferredParameter) else torch.Tensor
        delattr(tensor, _ENTRY)


def deferred_in(tensor: torch.Tensor) -> Deferred | None:
    """Return the storage of a tensor without values. None for an ordinary tensor."""
    return getattr(tensor, _ENTRY) if isinstance(tensor, _DeferredParameter | _DeferredTensor) else None


def can_defer(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's class can be replaced."""
    return type(tensor) in (torch.Tensor, nn.Parameter)


class _DeferredTensor(torch.Tensor):
    """Buffer without values."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with without_subclasses():
            return _answer(function, args, kwargs or {})


class _DeferredParameter(nn.Parameter):
    """Parameter without values."""

    __torch_function__ = _DeferredTensor.__torch_function__


def _answer(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a function that does not need the values.

    Raises:
        InputError: the function reads or changes values.
    """
    accessor = getattr(function, "__name__", "")
    name = getattr(function.__self__, "__name__", "") if accessor in ("__get__", "__set__", "__delete__") else accessor
    first: Any = args[0] if args else None
    is_attribute = accessor != name and name not in _VALUES
    if is_attribute or name in _OF_SHAPE or name.startswith("new_") or name.endswith("_like"):
        return function(*args, **kwargs)
    if name == "__repr__":
        return f"deferred({first.device}, {first.dtype}, size={tuple(first.size())})"
    if name in _CONVERSIONS and deferred_in(first) is not None:
        same = torch.empty(0, dtype=first.dtype, device=first.device)
        converted = function(same, *args[1:], **kwargs)
        if converted is same or isinstance(converted, str):
            return first if converted is same else converted
    if name == "data" and accessor == "__set__" and args[1] is first:
        return None  # Module.to does this when it converts nothing
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    used = [found for found in map(deferred_in, leaves) if found is not None]
    if used and all(one.on_demand for one in used):
        for one in dict.fromkeys(used):
            one.fill()
        return function(*args, **kwargs)
    raise _refusal([one.name for one in used])


def _refusal(names: Sequence[str]) -> InputError:
    return InputError(
        f"{names[0] if names else 'a parameter'!r} of the model has no values yet, because the model was built under "
        f"paceline.deferred(): paceline.start(model=...) gives it its initial values. Call the model, and read or "
        f"change its parameters, after that or inside the with block. Build a model that is not passed to "
        f"paceline.start outside the with block."
    )
