"""Backoff of a polling worker, which sleeps longer the longer it has waited."""

from __future__ import annotations

FIRST_BACKOFF_SECONDS = 5e-5
_LONGEST_SECONDS, _PART_OF_WAIT = 1e-3, 0.02
POLL_SECONDS = 0.02  # interval in seconds at which a waiting worker checks that the others are alive


def backoff_seconds(waited: float) -> float:
    """Return the next sleep in seconds, a fraction of the time waited, so that long waits leave the cores to others."""
    return min(max(FIRST_BACKOFF_SECONDS, waited * _PART_OF_WAIT), _LONGEST_SECONDS)
