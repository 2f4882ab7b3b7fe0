"""Division of sums by a count, which is a number on the host or a scalar tensor on the device."""

from __future__ import annotations

from typing import TypeAlias

import torch

from paceline.comm.reduction.narrow import FLOAT8
from paceline.system.torch_internals import foreach_div_

Divisor: TypeAlias = "torch.Tensor | float"

_ENCODED = (torch.int8, torch.int32, torch.int64, *FLOAT8)


def divide(value: torch.Tensor, divisor: Divisor, out: torch.Tensor) -> torch.Tensor:
    """Divide a tensor and return ``out``, which may be the tensor itself.

    Copies whole numbers and 8-bit floats, which are divided after they have been decoded (``step.gradients.codec``).
    A device would convert the divisor to the tensor's type first. float16 ends at 65,504, and bfloat16 cannot count
    beyond 256, so both are divided in float32.
    """
    if out.dtype in _ENCODED:
        return out.copy_(value)
    if isinstance(divisor, torch.Tensor) and _is_half(value):
        return out.copy_(value.float().div_(divisor))
    return torch.div(value, divisor, out=out)


def divide_all(values: list[torch.Tensor], divisor: Divisor) -> None:
    if isinstance(divisor, torch.Tensor):
        for one in filter(_is_half, values):
            divide(one, divisor, out=one)
        values = [one for one in values if not _is_half(one)]
    if values:
        foreach_div_(values, divisor)


def _is_half(value: torch.Tensor) -> bool:
    return value.dtype in (torch.float16, torch.bfloat16)
