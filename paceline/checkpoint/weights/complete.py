"""A model's complete weights in host memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def complete_weights(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    copied: bool = True,
) -> dict[str, Any]:
    """Return the contents of ``model.state_dict()`` on the host.

    Args:
        model: model whose parameters all have their values on this worker.
        dtype: dtype of the floating-point tensors. Defaults to their own.
        copied: whether to copy tensors that are contiguous, of this dtype and on the host already.

    Returns:
        the tensors, by the same names. A tensor that has several names, such as a tied weight, is returned once.
    """
    found: dict[int, torch.Tensor] = {}

    def on_host(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):  # from a module's get_extra_state()
            return copy.deepcopy(value)
        if id(value) not in found:
            kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
            found[id(value)] = value.detach().to("cpu", kind, copy=copied, memory_format=torch.contiguous_format)
        return found[id(value)]

    return {name: on_host(value) for name, value in model.state_dict(keep_vars=True).items()}
