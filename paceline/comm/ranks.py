"""How workers are named in messages."""

from __future__ import annotations

from collections.abc import Sequence


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 0, 2``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(rank) for rank in sorted(ranks))
