"""How the numbers of a tensor lie in memory: sent one after the other, laid out again as they were.

Kernels round differently on other strides, so what computes with a tensor from another worker needs its strides, too,
if it is to have the same bits. Where they are those of a part of a larger tensor, it takes as much room as that one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Strides = tuple[int, ...]


def strides_of(value: torch.Tensor) -> Strides:
    """The strides to lay out again; contiguous ones if numbers share memory in other ways than expanded."""
    steps, reach = value.stride(), 1
    for axis in reversed(_outer_first(value.shape, steps)):
        if steps[axis] < reach:
            return torch.empty(value.shape, device="meta").stride()
        reach += (value.shape[axis] - 1) * steps[axis]
    return steps


def dense_strides_of(value: torch.Tensor) -> Strides:
    """The strides with the axes in the same order, and no room for anything but the numbers."""
    return torch.empty_like(value, device="meta").stride()


def one_after_another(value: torch.Tensor, strides: Strides) -> torch.Tensor:
    """The numbers in the order of these strides, of any for its shape; contiguous, of shape [numel]."""
    return value.permute(_order(value.shape, strides)).reshape(-1).contiguous()


def laid_out(numbers: torch.Tensor, shape: Sequence[int], strides: Strides) -> torch.Tensor:
    """A tensor of this shape, of what :func:`one_after_another` returned, with these strides.

    Where they are those of an expanded tensor, and the numbers are not alike, there are others in their place.
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
    """The axes, those that were expanded before all others."""
    outer = _outer_first(shape, strides)
    return [*(axis for axis in range(len(shape)) if axis not in outer), *outer]


def _outer_first(shape: Sequence[int], strides: Strides) -> list[int]:
    """The axes along which there is more than one number in memory, the one with the largest stride first."""
    axes = [axis for axis, step in enumerate(strides) if shape[axis] > 1 and step]
    return sorted(axes, key=lambda axis: -strides[axis])
