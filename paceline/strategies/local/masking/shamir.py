"""Shamir's secret sharing: enough shares of a secret restore it, and fewer reveal nothing about it.

The secret is the value at 0 of a random polynomial of degree ``threshold - 1`` over a prime field, and a share is its
value at another point (Shamir, "How to share a secret", CACM 1979).
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping

PRIME = 2**521 - 1  # Mersenne prime above every secret of 64 bytes


def split(secret: int, points: Collection[int], threshold: int) -> dict[int, int]:
    """Return a share of a secret for each point, of which ``threshold`` restore it. No point is 0.

    >>> shares = split(1234, range(1, 6), threshold=3)
    >>> join({point: shares[point] for point in (5, 1, 4)})
    1234
    """
    assert secret < PRIME and 0 not in points and threshold <= len(points)
    coefficients = [*(secrets.randbelow(PRIME) for _ in range(threshold - 1)), secret]
    shares = {}
    for point in points:
        value = 0
        for coefficient in coefficients:
            value = (value * point + coefficient) % PRIME
        shares[point] = value
    return shares


def join(shares: Mapping[int, int]) -> int:
    """Return the secret from shares by their points, by Lagrange interpolation at 0."""
    secret = 0
    for point, share in shares.items():
        above = below = 1
        for other in shares:
            if other != point:
                above = above * other % PRIME
                below = below * (other - point) % PRIME
        secret = (secret + share * above * pow(below, -1, PRIME)) % PRIME
    return secret
