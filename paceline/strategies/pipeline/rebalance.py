"""Rebalancing of a pipeline whose stages take longer than the measured costs of their layers predict.

In each step all workers learn the compute time of each worker, so all decide alike without more communication. A stage
is slow because its worker is slow, or because its layers have become slower. In either case the measured seconds of its
layers are scaled, and the model is cut for the scaled costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from paceline.schedule.balance import fit_bounds

WINDOW = 20  # number of steps between two decisions
MINIMUM_GAIN = 1.1  # cut again if the slowest stage would be at least this many times faster

Bounds = tuple[tuple[int, int], ...]


class Decision(NamedTuple):
    """Slowest stage, its time relative to the mean stage, a better cut, and the speedup of the slowest stage by it."""

    stage: int
    longer: float
    bounds: Bounds
    gain: float

    def describe(self) -> str:
        return (
            f"stage {self.stage} takes {self.longer:.2f} times as long as the mean stage; the model is cut again, "
            f"which should make the slowest stage {self.gain:.2f} times faster"
        )


class Rebalance:
    """Comparison of the compute times of the stages with the measured costs of their layers.

    Args:
        workers_of: ranks that hold each stage. A rank holds one stage.
    """

    def __init__(
        self, costs: Sequence[float], bounds: Sequence[tuple[int, int]], workers_of: Sequence[Sequence[int]]
    ) -> None:
        self._costs = costs
        self._bounds = tuple(bounds)
        self._workers_of = workers_of
        self._steps: list[list[float]] = []

    def add_step(self, seconds: list[float]) -> Decision | None:
        """Add the compute time of each rank. Returns a decision once in ``WINDOW`` steps, if there is a better cut."""
        self._steps.append(seconds)
        if len(self._steps) < WINDOW:
            return None
        usual = [median(column) for column in zip(*self._steps, strict=True)]
        self._steps = []
        stages = [max(usual[rank] for rank in ranks) for ranks in self._workers_of]
        predicted = [sum(self._costs[begin:end]) for begin, end in self._bounds]
        if min(stages) <= 0 or min(predicted) <= 0:
            return None
        factors = [now / before for now, before in zip(stages, predicted, strict=True)]
        bounds = fit_bounds(self._costs, factors)
        after = max(factor * sum(self._costs[begin:end]) for factor, (begin, end) in zip(factors, bounds, strict=True))
        slowest = max(stages)
        if slowest < MINIMUM_GAIN * after:
            return None
        longer = slowest * len(stages) / sum(stages)
        return Decision(stages.index(slowest), longer, bounds, slowest / after)
