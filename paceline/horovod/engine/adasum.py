"""Adasum: sum of gradients that counts their common component once (Maleki et al. 2020, arXiv 2006.02924).

Two parallel gradients give their mean, and two orthogonal gradients their sum. Pairs are combined along a tree::

    a ─┐
    b ─┴─ ab ─┐
    c ─┐      ├─ abcd
    d ─┴─ cd ─┘
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def adasum(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Combine vectors of the same shape along a binary tree, in float64.

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
