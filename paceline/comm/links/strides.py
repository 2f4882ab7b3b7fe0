"""Strides of tensors: elements are sent contiguously, and laid out again with the original strides.

Kernels may round differently with other strides, so a received tensor needs its original strides if results must have
the same bits. With the strides of a view into a larger tensor, it takes as much memory as the larger tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Strides = tuple[int, ...]


def strides_of(value: torch.Tensor) -> Strides:
    """Return the strides to restore. They are contiguous if elements overlap in memory other than by expansion."""
    steps, reach = value.stride(), 1
    for axis in reversed(_outer_first(value.shape, steps)):
        if steps[axis] < reach:
            return torch.empty(value.shape, device="meta").stride()
        reach += (value.shape[axis] - 1) * steps[axis]
    return steps


def dense_strides_of(value: torch.Tensor) -> Strides:
    """Return dense strides with the axes in the same order in memory."""
    return torch.empty_like(value, device="meta").stride()


def one_after_another(value: torch.Tensor, strides: Strides) -> torch.Tensor:
    """Return the elements as a contiguous tensor of shape [numel], in memory order of strides that fit its shape."""
    return value.permute(_order(value.shape, strides)).reshape(-1).contiguous()


def laid_out(numbers: torch.Tensor, shape: Sequence[int], strides: Strides) -> torch.Tensor:
    """Return the output of :func:`one_after_another` as a tensor of this shape, with these strides.

    The result has other strides if ``strides`` are those of an expanded tensor but the expanded elements differ.
    """
    if not numbers.numel():
        return numbers.view(tuple(shape))
    order = _order(shape, strides)
    sizes = [1 if step == 0 else size for size, step in zip(shape, strides, strict=True)]
    blocks = numbers.view(-1, math.prod(sizes))
    if len(blocks) > 1 and not bool((blocks == blocks[0]).all()):
        return numbers.view([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(len(order))])
    reach = sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
    if reach < blocks.shape[1]:
        return blocks[0].as_strided(sizes, strides).expand(tuple(shape))
    value = torch.empty_strided(sizes, strides, dtype=numbers.dtype, device=numbers.device)
    turned = value.permute(order)
    turned.copy_(blocks[0].view(turned.shape))
    return value.expand(tuple(shape))


def _order(shape: Sequence[int], strides: Strides) -> list[int]:
    """Return the axes in memory order, with expanded axes first."""
    outer = _outer_first(shape, strides)
    return [*(axis for axis in range(len(shape)) if axis not in outer), *outer]


def _outer_first(shape: Sequence[int], strides: Strides) -> list[int]:
    """Return the axes with more than one element in memory, ordered by decreasing stride."""
    axes = [axis for axis, step in enumerate(strides) if shape[axis] > 1 and step]
    return sorted(axes, key=lambda axis: -strides[axis])
