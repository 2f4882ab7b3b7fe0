"""Interval between saves with ``checkpoint.every = "auto"``.

A save costs its stall; a failure costs the work since the last save. Their sum is smallest at about

    interval = sqrt(2 * stall * MTBF)

(Young 1974, "A first order approximation to the optimum checkpoint interval"). The code uses the refinement of Daly
2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", equation 37. The time for which
the background thread writes after the stall adds a constant to the cost of each failure, and does not move the optimum.
But a save cannot begin before the last save has ended, so the duration of a save is a lower bound for the interval.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median

FIRST = 10  # number of steps before the first save, which measures the cost of a save
_SAVES = 5  # number of saves in a median
_STEPS = 64  # number of steps in a median
_NOTABLE = 1.2


def best_interval(cost: float, mtbf: float) -> float:
    """Return the interval in seconds that loses the least time.

    Args:
        cost: seconds that a save stalls training.
        mtbf: mean seconds between two failures of the run.
    """
    if cost >= 2 * mtbf:
        return mtbf
    part = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - cost


class Interval:
    """Number of steps between saves, from measured times of steps and saves.

    Args:
        mtbf: mean seconds between two failures of the run.
    """

    def __init__(self, mtbf: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._mtbf, self._clock = mtbf, clock
        self._step_times: deque[float] = deque(maxlen=_STEPS)
        self._stalls: deque[float] = deque(maxlen=_SAVES)
        self._totals: deque[float] = deque(maxlen=_SAVES)
        self._last_end: float | None = None
        self._saved_at = 0
        self._announced = 0

    def step(self) -> None:
        now = self._clock()
        if self._last_end is not None:
            self._step_times.append(now - self._last_end)
        self._last_end = now

    def reset(self, step: int) -> None:
        """Count from this step on, because a save was started after it or training was resumed from it."""
        self._saved_at = step
        self._last_end = self._clock()

    def add_save(self, stall: float, total: float) -> None:
        """Add a measured save: seconds for which training stalled, and seconds in total."""
        self._stalls.append(stall)
        self._totals.append(total)

    def due(self, step: int) -> bool:
        return step - self._saved_at >= self.steps

    @property
    def steps(self) -> int:
        if not self._stalls or not self._step_times:
            return FIRST
        return max(1, math.ceil(self._seconds() / max(median(self._step_times), 1e-9)))

    def decision(self) -> dict[str, object] | None:
        """Return the interval and its reason if it is new or has changed by 20 %; else None."""
        steps = self.steps
        if (
            not self._stalls
            or not self._step_times
            or max(steps, self._announced) < _NOTABLE * min(steps, self._announced)
        ):
            return None
        self._announced = steps
        stall, total, hours = median(self._stalls), median(self._totals), self._mtbf / 3600
        reason = f"a save stalls training for {_short(stall)} s, one failure in {hours:g} h expected (Young/Daly)"
        if self._seconds() == total:
            reason += f", and takes {_short(total)} s, the lower bound"
        seconds = steps * median(self._step_times)
        text = f"checkpoint every {steps} step{'s' if steps > 1 else ''} ({_short(seconds)} s): {reason}"
        return {"steps": steps, "interval": seconds, "stall": stall, "total": total, "mtbf_hours": hours, "text": text}

    def _seconds(self) -> float:
        return max(best_interval(median(self._stalls), self._mtbf), median(self._totals))


def _short(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"
