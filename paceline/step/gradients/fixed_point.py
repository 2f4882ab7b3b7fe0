"""Gradients as integers: their sum has the same bits in any order, so any all-reduce is exact.

Each microbatch's gradient is rounded to multiples of a unit, a power of two for each parameter, and these integers are
added up. The unit is chosen before the step, from the largest gradient of earlier steps (``step.gradients.codec``)::

    bound            2**bound is above every |gradient| of the last step; it falls by 1/8 a step at most
    a step allows    |gradient| < 2**(bound + 2): at least four times as much
    unit             2**(bound + 2 - bits), with V * 2**bits < 2**31 for V microbatches

So the sum of V microbatches fits into 32 bits (64 for float64), in any order of additions.

Rounding to a common unit before adding follows Demmel and Nguyen 2013 (Fast reproducible floating-point summation).
"""

from __future__ import annotations

import math

import torch

from paceline.step.gradients.codec import Format, Turn

_HEADROOM = 2
_FALL = 0.125
_WHOLE = {torch.float64: torch.int64}  # dtype of the sums if it is not int32
_FINEST = {torch.int32: 126, torch.int64: 1022}
"""No unit is below 2 to the negative of this, the smallest normal number."""
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Parameter dtypes whose gradients can be encoded as integers."""


class PowerOfTwo(Format):
    """Bound on the gradients of a parameter: the exponent of a power of two above the largest ones of earlier steps."""

    def fits(self, largest: float, bound: float | None) -> bool:
        """Return whether the gradient is below the limit, which 2 ** ``bound`` sets."""
        return bound is not None and math.frexp(largest)[1] <= allowed(bound)

    def bound(self, largest: float, before: float | None) -> float:
        """Return the exponent of the next power of two. It rises at once and falls slowly."""
        now = float(math.frexp(largest)[1])
        return now if before is None else max(now, before - _FALL)


class WholeNumbers(PowerOfTwo):
    """Format of ``exact="fixed-point"``: 32-bit integers, 64-bit for float64.

    Args:
        dtype: dtype of the parameter.
        microbatches: largest number of microbatches in a sum.
    """

    state, whole = "fixed_point", True

    def __init__(self, dtype: torch.dtype, microbatches: int) -> None:
        self._dtype = _WHOLE.get(dtype, torch.int32)
        self._bits = bits_of(self._dtype, microbatches)

    def example(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter.element_size() == self._dtype.itemsize:
            return parameter.detach().view(self._dtype)
        return torch.empty_like(parameter, dtype=self._dtype)

    def scale(self, bound: float | None) -> float:
        return 2.0 ** -self._exponent(bound)

    def unit(self, bound: float | None) -> float:
        """Return the unit. Without a known bound it does not matter."""
        return 2.0 ** self._exponent(bound)

    def _exponent(self, bound: float | None) -> int:
        return max(allowed(bound) - self._bits, -_FINEST[self._dtype])

    def pack(self, value: torch.Tensor, turn: Turn) -> torch.Tensor:
        """Return the rounded gradient as integers."""
        return value.to(self._dtype)


def bits_of(kind: torch.dtype, microbatches: int) -> int:
    """Return the largest number of bits for an integer so that the sum over all microbatches fits into ``kind``.

    >>> bits_of(torch.int32, 8)
    27
    """
    return (torch.iinfo(kind).max // microbatches).bit_length() - 1


def allowed(bound: float | None) -> int:
    """Return the exponent of the limit on gradients, given the bound from earlier steps."""
    return math.ceil(bound or 0.0) + _HEADROOM
