"""How old the weights of asynchronous updates were, counted over all workers and generations.

The *delay* of a gradient is the number of updates between its pull and its own; its *staleness* the number of earlier
rounds that were missing, in part or whole, in the weights it was computed with. A round is a step of each worker.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Protocol


class Counts(Protocol):
    """How often each number has been; it outlives the worker that counted."""

    def add(self, number: int) -> None:
        """Count a number once more."""
        ...

    def total(self) -> Counter[int]:
        """The counts of all workers."""
        ...


class Staleness:
    """Two histograms that outlive each worker.

    Args:
        delays, rounds: where to count.
        state: what :meth:`state` returned in earlier generations.
    """

    def __init__(self, delays: Counts, rounds: Counts, state: dict[str, Any]) -> None:
        self._delays, self._rounds = delays, rounds
        self._earlier = [Counter(dict(state.get(name, []))) for name in ("delays", "rounds")]

    def add(self, delay: int, rounds: int | None = None) -> None:
        """Count an update of this worker; where there are no rounds, its delay alone."""
        self._delays.add(delay)
        if rounds is not None:
            self._rounds.add(rounds)

    def counts(self) -> tuple[dict[int, int], dict[int, int]]:
        """How often each delay, and each number of rounds, has been so far."""
        delays, rounds = self._earlier
        return dict(delays + self._delays.total()), dict(rounds + self._rounds.total())

    def state(self) -> dict[str, list[list[int]]]:
        """The counts, as the strategy's state keeps them."""
        delays, rounds = (sorted(map(list, counts.items())) for counts in self.counts())
        return {"delays": delays, "rounds": rounds}

    def summary(self) -> str:
        """The counts in one sentence; empty before the first update."""
        delays, rounds = self.counts()
        if not delays:
            return ""
        updates = sum(delays.values())
        mean = math.fsum(delay * count for delay, count in delays.items()) / updates
        text = (
            f"{updates} updates so far: {mean:.2g} others between weights and update on average, {max(delays)} at most"
        )
        return text + (f"; weights at most {max(rounds)} rounds behind" if rounds else "")
