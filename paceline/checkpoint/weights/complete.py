"""Copies of a model's complete weights in host memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def complete_weights(
    model: nn.Module, dtype: torch.dtype | None = None, instead: Mapping[nn.Parameter, torch.Tensor] | None = None
) -> dict[str, Any]:
    """Copy the contents of ``model.state_dict()`` to the host.

    Args:
        model: model whose parameters all have their values on this worker.
        dtype: dtype of the floating-point tensors. Defaults to their own.
        instead: replacements for values of parameters, such as averages.

    Returns:
        the copies, by the same names. A tensor that has several names, such as a tied weight, is copied once.
    """
    copies: dict[int, torch.Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):  # from a module's get_extra_state()
            return copy.deepcopy(value)
        if id(value) not in copies:
            kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
            source = (instead or {}).get(value, value) if isinstance(value, nn.Parameter) else value
            copies[id(value)] = source.detach().to("cpu", kind, copy=True, memory_format=torch.contiguous_format)
        return copies[id(value)]

    return {name: copied(value) for name, value in model.state_dict(keep_vars=True).items()}
