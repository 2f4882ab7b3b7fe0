"""Whether the stages of a pipeline take as long as was measured when the model was cut, and what another cut gains.

All workers tell each other in each step how long they computed, so all come to the same verdict without another word.
A stage that takes longer than its layers were measured to take is on a slow worker, or its layers have become slower:
either way its seconds are scaled, and the model is cut again for the scaled ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from paceline.schedule.balance import fit_bounds

WINDOW = 20
"""Steps from one verdict to the next."""
WORTH = 1.1
"""The model is cut again if the slowest stage would be so many times faster."""

Bounds = tuple[tuple[int, int], ...]


class Decision(NamedTuple):
    """What was found: the slowest stage, how many times longer than the mean stage it takes, a better cut, and how many
    times faster the slowest stage would be with it."""

    stage: int
    longer: float
    bounds: Bounds
    gain: float

    def told(self) -> str:
        """In words."""
        return (
            f"stage {self.stage} takes {self.longer:.2f} times as long as the mean stage; the model is cut again, "
            f"which should make the slowest stage {self.gain:.2f} times faster"
        )


class Rebalance:
    """Watches the seconds of the stages.

    Args:
        costs: seconds that each layer was measured to take.
        bounds: the layers of each stage.
        workers_of: the ranks that hold each stage; a rank holds one.
    """

    def __init__(
        self, costs: Sequence[float], bounds: Sequence[tuple[int, int]], workers_of: Sequence[Sequence[int]]
    ) -> None:
        self._costs = costs
        self._bounds = tuple(bounds)
        self._workers_of = workers_of
        self._seen: list[list[float]] = []

    def see(self, seconds: list[float]) -> Decision | None:
        """A step took each rank so many seconds of computing; a verdict now and then, if there is a better cut."""
        self._seen.append(seconds)
        if len(self._seen) < WINDOW:
            return None
        usual = [median(column) for column in zip(*self._seen, strict=True)]
        self._seen = []
        stages = [max(usual[rank] for rank in ranks) for ranks in self._workers_of]
        predicted = [sum(self._costs[begin:end]) for begin, end in self._bounds]
        if min(stages) <= 0 or min(predicted) <= 0:
            return None
        factors = [now / before for now, before in zip(stages, predicted, strict=True)]
        bounds = fit_bounds(self._costs, factors)
        after = max(factor * sum(self._costs[begin:end]) for factor, (begin, end) in zip(factors, bounds, strict=True))
        slowest = max(stages)
        if slowest < WORTH * after:
            return None
        longer = slowest * len(stages) / sum(stages)
        return Decision(stages.index(slowest), longer, bounds, slowest / after)
