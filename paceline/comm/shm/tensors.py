"""Tensors that lie in a block of memory, each at an address that processors like."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import TypeAlias

import torch

Kinds: TypeAlias = "dict[str, tuple[torch.dtype, torch.Size]]"
"""The types and shapes of tensors by name."""

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


def kinds_of(tensors: Mapping[str, torch.Tensor]) -> Kinds:
    """What is needed to lay out such tensors one after the other."""
    return {name: (value.dtype, value.shape) for name, value in tensors.items()}


def room_of(kinds: Kinds) -> int:
    """The bytes that they take one after the other."""
    return sum(aligned(shape.numel() * dtype.itemsize) for dtype, shape in kinds.values())


def views_of(flat: torch.Tensor, kinds: Kinds) -> dict[str, torch.Tensor]:
    """The tensors that lie one after the other in the bytes of ``flat``."""
    views, start = {}, 0
    for name, (dtype, shape) in kinds.items():
        size = shape.numel() * dtype.itemsize
        views[name] = flat[start : start + size].view(dtype).view(shape)
        start += aligned(size)
    return views
