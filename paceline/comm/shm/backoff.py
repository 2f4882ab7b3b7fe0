"""How a worker waits for something that nobody wakes it for: short naps first, which get longer the longer it waits."""

from __future__ import annotations

FIRST_BACKOFF_SECONDS = 5e-5
_LONGEST_NAP_SECONDS, _PART_OF_WAIT = 1e-3, 0.02
LOOK_SECONDS = 0.02
"""How often a waiting worker looks whether the others still live."""


def backoff_seconds(waited: float) -> float:
    """The next nap: a part of the time waited, so that who waits long leaves the cores to others."""
    return min(max(FIRST_BACKOFF_SECONDS, waited * _PART_OF_WAIT), _LONGEST_NAP_SECONDS)
