"""Tensors that lie in a block of memory, each at an address that processors like."""

from __future__ import annotations

import mmap

import torch

_BYTES = 64
"""Of a line of the processor's cache."""


def aligned(size: int) -> int:
    """The room that so many bytes take."""
    return -(-size // _BYTES) * _BYTES


def view_of(block: mmap.mmap, place: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor that lies there."""
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(block, dtype=dtype, count=count, offset=place).view(shape)
