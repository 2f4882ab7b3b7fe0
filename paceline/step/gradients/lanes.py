"""Gradients as codes of 8 or 4 bits, whose sums over a batch have just as many bits as they need.

Each microbatch's gradient becomes codes from -limit to limit: at random the multiple of a unit below or above it, so
that the mean of all roundings is the gradient. A sum of V codes fits into a lane of a few bits more, and lanes are
packed side by side into words::

    int8, V <= 16    codes of 8 bits    sums up to 2,047 in 12 bits    five lanes in an int64: 0.4 of float32's bytes
    int4, V <= 18    codes of 4 bits    sums up to 127 in 8 bits       an int8 each: 0.25

With fewer microbatches the codes are wider, because their sums have room: -15 to 15 in 8 bits for V = 8. With more,
lanes are wider.

    word = lane 0 + 2**12 lane 1 + 2**24 lane 2 + 2**36 lane 3 + 2**48 lane 4

A lane may be negative: the word is the sum of numbers, not of bit patterns. So the sum of words has the sums of codes
in its lanes, and every exchange that adds up integers adds up words, the all-reduce of a back end as well. Sums of
integers have no order, so the result does not depend on which worker adds up which sum.

The random numbers are keyed by the seed, the step, the microbatch and the parameter, like everything that is random in
a step. Unbiased random rounding to few levels is QSGD (Alistarh et al. 2017, arXiv 1610.02132).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from paceline.step.gradients.codec import Format, Turn

LIMITS = {"int8": 127, "int4": 7}  # largest code of each format

_HEADROOM = {127: 4.0, 7: 1.5}
"""Largest gradient that a step allows, in bounds, by the code that has to fit: few levels leave little room."""
_FALL = 0.99
_FRACTION = 16  # bits of a random number, which decides between the two codes next to a gradient
_MOST = 2**14  # codes with their fractions are numbers of int32
_FINEST = 2.0**-100  # no gradient counts as larger than zero below this: its scale would not be a number of float32
_BELOW = 1 - 2.0**-20  # keeps the largest gradient from becoming a code above the limit, because the product is rounded


class Lanes(NamedTuple):
    """Layout of the sums of codes in words of integers."""

    dtype: torch.dtype  # type of a word
    per_word: int  # number of lanes in a word
    width: int  # bits of a lane


def lanes_for(limit: int, microbatches: int) -> Lanes:
    """Return the narrowest lanes that hold the sum of ``microbatches`` codes. The back ends add up these types only.

    >>> lanes_for(127, 16)
    Lanes(dtype=torch.int64, per_word=5, width=12)
    >>> lanes_for(7, 18)
    Lanes(dtype=torch.int8, per_word=1, width=8)
    """
    for lanes in (Lanes(torch.int8, 1, 8), *(Lanes(torch.int64, count, 64 // count) for count in (5, 4, 3))):
        if limit * microbatches < 1 << (lanes.width - 1):
            return lanes
    return Lanes(torch.int32, 1, 32)


def widest(lanes: Lanes, microbatches: int) -> int:
    """Return the largest code whose sum over ``microbatches`` fits into a lane.

    >>> widest(lanes_for(7, 8), 8)
    15
    """
    return min(((1 << (lanes.width - 1)) - 1) // microbatches, _MOST)


def pack(codes: torch.Tensor, lanes: Lanes) -> torch.Tensor:
    """Return the words of a one-dimensional tensor of codes. Lane i holds the i-th part of the codes."""
    if lanes.per_word == 1:
        return codes.to(lanes.dtype)
    room = words_of(codes.numel(), lanes)
    words = torch.zeros(room, dtype=lanes.dtype, device=codes.device)
    for lane in reversed(range(lanes.per_word)):
        words <<= lanes.width  # the first time zeros
        part = codes[lane * room : (lane + 1) * room]
        words[: part.numel()] += part
    return words


def unpack(words: torch.Tensor, lanes: Lanes, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the sums of codes in words as a one-dimensional tensor of a floating-point dtype."""
    if lanes.per_word == 1:
        return words.to(dtype)
    half = 1 << (lanes.width - 1)
    shifted = words + sum(half << lane * lanes.width for lane in range(lanes.per_word))  # no lane is negative now
    sums = torch.empty(lanes.per_word * words.numel(), dtype=dtype, device=words.device)
    for lane, part in enumerate(sums.view(lanes.per_word, -1)):
        part.copy_((shifted >> lane * lanes.width).bitwise_and_(2 * half - 1))
    return sums.sub_(half)[:numel]


def words_of(numel: int, lanes: Lanes) -> int:
    """Return the number of words for ``numel`` codes."""
    return -(-numel // lanes.per_word)


def round_at_random(scaled: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return codes next to a gradient, with the gradient as their mean over all random numbers.

    Args:
        scaled: one-dimensional gradient in 1/65,536 of a unit, rounded to whole numbers.
        generator: generator on the device of the gradient. Every draw decides four codes.
    """
    draws = torch.empty(-(-scaled.numel() // 4), dtype=torch.int64, device=scaled.device)
    draws.random_(-(2**63), None, generator=generator)
    codes = scaled.to(torch.int32)
    codes += draws.view(torch.int16)[: codes.numel()]
    codes += 1 << (_FRACTION - 1)  # the draws were signed
    return codes.bitwise_right_shift_(_FRACTION)


class Codes(Format):
    """Format of codes with a few bits, for parameters of two and more dimensions.

    The bound of a parameter is a running maximum of its gradients: it rises at once, and falls by 1 % a step at most. A
    step allows gradients up to 4 times the bound with int8, and up to 1.5 times with int4.

    Args:
        limit: largest code that has to fit. Larger codes are used if a lane has room for their sum.
        microbatches: largest number of microbatches in a sum.
        parts: parts of the flattened gradient that have words of their own. Defaults to the whole gradient.
    """

    state, whole = "codes", True

    def __init__(self, limit: int, microbatches: int, parts: Sequence[slice] = ()) -> None:
        self._parts = parts
        self._lanes = lanes_for(limit, microbatches)
        self._headroom = _HEADROOM[limit]
        self._limit = widest(self._lanes, microbatches)

    def example(self, parameter: torch.Tensor) -> torch.Tensor:
        words = self.encoded(self._parts or [slice(0, parameter.numel())])
        return torch.empty(words[-1].stop, dtype=self._lanes.dtype, device=parameter.device)

    def encoded(self, parts: Sequence[slice]) -> list[slice]:
        ends = accumulate((words_of(one.stop - one.start, self._lanes) for one in parts), initial=0)
        return [slice(*pair) for pair in pairwise(ends)]

    def fits(self, largest: float, bound: float | None) -> bool:
        """Return whether no code would be above the limit."""
        return bound is not None and largest <= self._allowed(bound)

    def bound(self, largest: float, before: float | None) -> float:
        """Return the running maximum."""
        return largest if before is None else max(largest, before * _FALL)

    def scale(self, bound: float | None) -> float:
        """Return the number of steps of 1/65,536 unit in 1."""
        return self._limit * 2.0**_FRACTION * _BELOW / self._allowed(bound)

    def unit(self, bound: float | None) -> float:
        """Return the size of a code's step."""
        return self._allowed(bound) / (self._limit * _BELOW)

    def pack(self, value: torch.Tensor, turn: Turn) -> torch.Tensor:
        """Return words with the codes of a gradient."""
        codes = round_at_random(value.reshape(-1), turn.chance())
        if len(self._parts) < 2:
            return pack(codes, self._lanes)
        return torch.cat([pack(codes[part], self._lanes) for part in self._parts])

    def unpack(self, value: torch.Tensor, parameter: torch.Tensor, bound: Any) -> torch.Tensor:
        """Return the sums of codes, with the strides of the parameter."""
        wide = torch.promote_types(parameter.dtype, torch.float32)
        sums = unpack(value, self._lanes, parameter.numel(), wide).view(parameter.shape)
        return sums if parameter.is_contiguous() else torch.empty_like(parameter, dtype=wide).copy_(sums)

    def _allowed(self, bound: float | None) -> float:
        """Return the largest gradient of a step, given the bound from earlier steps."""
        return max((1.0 if bound is None else bound) * self._headroom, _FINEST)
