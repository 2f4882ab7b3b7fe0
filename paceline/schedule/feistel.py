"""Pseudorandom permutation of any length with random access: any range is computed without the rest.

::

    number    L | R          two halves of the same width, of a power of four >= length
    round k   L, R = R, L ^ f(R, key k)
    result    if it is >= length, encipher it again: cycle walking

Sources: M. Luby, C. Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", SIAM J. Comput.
17(2), 1988: a network of these rounds is a permutation for any ``f``, and pseudorandom from four rounds on. J. Black,
P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002: cycle walking restricts the permutation to the numbers
below the length. ``f`` is the finalizer of SplitMix64: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014, figure 17.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.uint64]
ROUNDS = 8
"""Twice the number that the proof requires of ideal round functions. ``f`` is not an ideal function."""


def permute(start: int, stop: int, length: int, seed: int) -> list[int]:
    """Return the numbers at the positions ``start`` to ``stop`` (exclusive) of a permutation.

    Time and memory are proportional to ``stop - start``. A number is enciphered fewer than four times on average.

    Args:
        start: first position.
        stop: end position (exclusive), at most ``length``.
        length: length of the permutation, at most 2**62.
        seed: seed that selects the permutation, 0 to 2**63 - 1.

    >>> permute(0, 8, length=8, seed=1)
    [2, 6, 3, 4, 7, 5, 0, 1]
    >>> permute(10**9 - 3, 10**9, length=10**9, seed=1)
    [586651744, 159720412, 980811638]
    """
    width = max(1, -(-(length - 1).bit_length() // 2))
    keys = _keys(seed)
    numbers = _encipher(np.arange(start, stop, dtype=np.uint64), width, keys)
    while len(outside := np.flatnonzero(numbers >= np.uint64(length))):
        numbers[outside] = _encipher(numbers[outside], width, keys)
    found: list[int] = numbers.tolist()
    return found


def _encipher(numbers: Numbers, width: int, keys: tuple[int, ...]) -> Numbers:
    """Permute the numbers below ``4**width``."""
    shift, mask = np.uint64(width), np.uint64((1 << width) - 1)
    left, right = numbers >> shift, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + np.uint64(key)) >> np.uint64(64 - width))
    return (left << shift) | right


def _mix(numbers: Numbers) -> Numbers:
    """Apply the finalizer of SplitMix64. Products wrap around."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _keys(seed: int) -> tuple[int, ...]:
    """Return a 64-bit key for each round."""
    return struct.unpack(f"<{ROUNDS}Q", hashlib.blake2b(struct.pack("<q", seed), digest_size=8 * ROUNDS).digest())
