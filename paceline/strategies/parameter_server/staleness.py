"""Staleness of the weights of asynchronous updates, counted over all workers and generations.

The *delay* of a gradient is the number of updates between its pull and its own update. Its *staleness* is the number of
earlier rounds that were missing, in part or whole, in the weights it was computed from. A round is a step per worker.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Protocol


class Counts(Protocol):
    """Histogram of numbers that outlives the worker that counts."""

    def add(self, number: int) -> None:
        """Count a number once more."""

    def total(self) -> Counter[int]:
        """Return the counts of all workers."""


class Staleness:
    """Histograms of delays and missing rounds, which outlive each worker.

    Args:
        state: result of :meth:`state` from earlier generations.
    """

    def __init__(self, delays: Counts, rounds: Counts, state: dict[str, Any]) -> None:
        self._delays, self._rounds = delays, rounds
        self._earlier = [Counter(dict(state.get(name, []))) for name in ("delays", "rounds")]

    def add(self, delay: int, rounds: int | None = None) -> None:
        """Count an update of this worker. Without ``rounds``, count only its delay."""
        self._delays.add(delay)
        if rounds is not None:
            self._rounds.add(rounds)

    def counts(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the counts of each delay and of each number of rounds, over all generations."""
        delays, rounds = self._earlier
        return dict(delays + self._delays.total()), dict(rounds + self._rounds.total())

    def state(self) -> dict[str, list[list[int]]]:
        """Return the counts in the form in which the strategy state keeps them."""
        delays, rounds = (sorted(map(list, counts.items())) for counts in self.counts())
        return {"delays": delays, "rounds": rounds}

    def summary(self) -> str:
        """Return the counts in one sentence, or an empty string before the first update."""
        delays, rounds = self.counts()
        if not delays:
            return ""
        updates = sum(delays.values())
        mean = math.fsum(delay * count for delay, count in delays.items()) / updates
        text = (
            f"{updates} updates so far: {mean:.2g} others between weights and update on average, {max(delays)} at most"
        )
        return text + (f"; weights at most {max(rounds)} rounds behind" if rounds else "")
