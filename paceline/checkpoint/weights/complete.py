"""A model's complete weights in host memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def complete_weights(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return copies of the contents of ``model.state_dict()`` on the host, see :func:`on_host`."""
    return on_host(model.state_dict(keep_vars=True), dtype, copied=True)


def on_host(values: Mapping[str, Any], dtype: torch.dtype | None = None, *, copied: bool = False) -> dict[str, Any]:
    """Return tensors and other values of a state_dict on the host.

    Args:
        values: values by name, all of which this worker has.
        dtype: dtype of the floating-point tensors. Defaults to their own.
        copied: whether to copy tensors that are contiguous, of this dtype and on the host already.

    Returns:
        the values, by the same names. A tensor that has several names, such as a tied weight, is returned once.
    """
    found: dict[int, torch.Tensor] = {}

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):  # from a module's get_extra_state()
            return copy.deepcopy(value)
        if id(value) not in found:
            kind = dtype_of(value, dtype)
            found[id(value)] = value.detach().to("cpu", kind, copy=copied, memory_format=torch.contiguous_format)
        return found[id(value)]

    return {name: moved(value) for name, value in values.items()}


def dtype_of(value: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a tensor after the conversion of floating-point tensors."""
    return dtype if dtype is not None and value.is_floating_point() else value.dtype
