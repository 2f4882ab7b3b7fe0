"""Adasum: a sum of gradients that leaves out what they have in common (Maleki et al. 2020, arXiv 2006.02924).

Two gradients that point the same way give their mean, two at a right angle their sum::

    a ─┐
    b ─┴─ ab ─┐
    c ─┐      ├─ abcd
    d ─┴─ cd ─┘
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def adasum(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Combine vectors of one shape along a binary tree; computed in float64.

    Example:
        >>> adasum([torch.tensor([2.0, 0.0]), torch.tensor([0.0, 3.0])])
        tensor([2., 3.])
    """
    level = [one.double() for one in vectors]
    while len(level) > 1:
        pairs = [_pair(*level[place : place + 2]) for place in range(0, len(level) - 1, 2)]
        level = pairs + level[2 * len(pairs) :]
    return level[0].to(vectors[0].dtype)


def _pair(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    common = torch.dot(first.flatten(), second.flatten())
    left, right = first.square().sum(), second.square().sum()
    return first * _weight(common, left) + second * _weight(common, right)


def _weight(common: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    return torch.where(norm > 0, 1 - common / (2 * norm.clamp_min(torch.finfo(norm.dtype).tiny)), 1.0)
