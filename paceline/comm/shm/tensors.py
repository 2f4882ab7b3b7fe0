"""Tensors in a block of memory, each aligned to a cache line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

Kinds: TypeAlias = "dict[str, tuple[torch.dtype, torch.Size]]"  # types and shapes of tensors by name

CACHE_LINE = 64  # size of a cache line in bytes


def aligned(size: int) -> int:
    """Round up to whole cache lines."""
    return -(-size // CACHE_LINE) * CACHE_LINE


def view_of(block: memoryview, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(block, dtype=dtype, count=count, offset=offset).view(shape)


def bytes_of(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in row-major order. They are a view if the tensor is contiguous."""
    flat = value.detach().contiguous()
    # not reshape(-1): a tensor of at most one element counts as contiguous with a stride of 0, as an expanded one has
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def kinds_of(tensors: Mapping[str, torch.Tensor]) -> Kinds:
    """Return the types and shapes of tensors."""
    return {name: (value.dtype, value.shape) for name, value in tensors.items()}


def room_of(kinds: Kinds) -> int:
    """Return the number of bytes that tensors of these types and shapes take, each aligned to a cache line."""
    return sum(aligned(shape.numel() * dtype.itemsize) for dtype, shape in kinds.values())


def views_of(flat: torch.Tensor, kinds: Kinds) -> dict[str, torch.Tensor]:
    """Return views of the tensors that are packed in the bytes of ``flat``, each aligned to a cache line."""
    views, start = {}, 0
    for name, (dtype, shape) in kinds.items():
        size = shape.numel() * dtype.itemsize
        views[name] = flat[start : start + size].view(dtype).view(shape)
        start += aligned(size)
    return views
