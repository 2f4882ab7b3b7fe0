"""Gradients in half precision and in 8-bit floats on the wire.

With ``exact`` every node of the canonical tree is rounded, from the gradient of a microbatch to the sum over the batch,
whether it is sent or not. So the result does not depend on which worker adds up which numbers::

    level 2              round(a + b)
    level 1      round(a0 + a1)      round(b0 + b1)
    level 0      round   round       round   round       gradients of microbatches

Without ``exact``, a worker adds up its microbatches in float32, and only what is sent is rounded. In both cases the
numbers of a sum are added in float32, and the mean is divided in float32 after it has arrived.

float16 ends at 65,504, and the 8-bit floats at 57,344 (e5m2) and 448 (e4m3). So gradients are multiplied by a power of
two for each parameter, with which the sum of the batch stays below that. bfloat16 has the range of float32.
"""

from __future__ import annotations

import math

import torch

from paceline.comm.reduction.narrow import E4M3, E5M2
from paceline.step.gradients.codec import Format, Turn
from paceline.step.gradients.fixed_point import PowerOfTwo, allowed

_MOST = 100  # largest exponent of a scale, so that it and its inverse are numbers of float32

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "fp8-e4m3": E4M3, "fp8-e5m2": E5M2}


class Rounded(Format):
    """Floating-point numbers of fewer bits, without a scale.

    Args:
        dtype: type on the wire.
        nodes: whether every node of the tree is rounded. Otherwise only sums are that are sent.
    """

    def __init__(self, dtype: torch.dtype, nodes: bool) -> None:
        self._dtype, self._nodes = dtype, nodes

    def example(self, parameter: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(parameter, dtype=self._dtype)

    def pack(self, value: torch.Tensor, turn: Turn) -> torch.Tensor:
        """Return the gradient, rounded if it is a node of the tree."""
        return value.to(self._dtype) if self._nodes else value


class Scaled(PowerOfTwo, Rounded):
    """The same with a power of two as the scale of each parameter, from its largest gradient in earlier steps.

    Args:
        dtype, nodes: see :class:`Rounded`.
        microbatches: largest number of microbatches in a sum.
    """

    state = "float16"  # for all types: the bounds are those of the gradients

    def __init__(self, dtype: torch.dtype, nodes: bool, microbatches: int) -> None:
        super().__init__(dtype, nodes)
        self._room = int(math.log2(torch.finfo(dtype).max)) - (microbatches - 1).bit_length()

    def scale(self, bound: float | None) -> float:
        """Return the power of two by which gradients are multiplied."""
        return 2.0 ** min(self._room - allowed(bound), _MOST)

    def unit(self, bound: float | None) -> float:
        return 1.0 / self.scale(bound)
