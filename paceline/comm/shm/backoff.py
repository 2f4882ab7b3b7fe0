"""Backoff of a worker that polls: the longer it has waited, the longer it sleeps."""

from __future__ import annotations

FIRST_BACKOFF_SECONDS = 5e-5
_LONGEST_SECONDS, _PART_OF_WAIT = 1e-3, 0.02
LOOK_SECONDS = 0.02
"""How often a waiting worker checks that the others are alive."""


def backoff_seconds(waited: float) -> float:
    """The next sleep: a part of the time waited, so that a long wait leaves the cores to others."""
    return min(max(FIRST_BACKOFF_SECONDS, waited * _PART_OF_WAIT), _LONGEST_SECONDS)
