"""Layers that sleep instead of computing, so that two cores are enough for several workers.

A forward pass sleeps, and so do both halves of the split backward pass, each in a node of its own: the input gradient
alone does not take the time of the weight gradient.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

FORWARD, INPUT, WEIGHT = "forward", "input", "weight"
_SET_TIMER_SLACK = 29


def sharpen_sleep() -> None:
    """Let the kernel wake this process when it asked for it, not up to 50 microseconds later."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)


class _Slow(torch.autograd.Function):
    """The identity, forward and backward, after a sleep."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None


class _SlowBack(torch.autograd.Function):
    """The identity; the gradient sleeps."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None


class Sleeper(nn.Module):
    """A layer whose forward pass, and each half of whose backward pass, take ``seconds``.

    ``before`` gives the first layer a gradient to compute as well, because its input requires none.
    """

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.before, self.after = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
        self.seconds = seconds

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return _Slow.apply(values + self.before, self.seconds) + _SlowBack.apply(self.after, self.seconds)


def sleepers(seconds: Sequence[float], width: int) -> nn.Sequential:
    """A model of such layers."""
    return nn.Sequential(*[Sleeper(width, one) for one in seconds])


def targets(samples: int, width: int) -> torch.utils.data.TensorDataset:
    """What it is trained on."""
    return torch.utils.data.TensorDataset(torch.randn(samples, width), torch.randn(samples, width))
