"""How often to save when nobody says: as often as is worth it.

A save costs training its stall; a failure costs what was done since the last save. Both together are least at about

    interval = sqrt(2 * stall * MTBF)

(Young 1974, "A first order approximation to the optimum checkpoint interval"). Used here is the refinement of Daly
2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", equation 37. That the background
thread writes on after the stall makes every failure cost the same time more, so it does not move the optimum; but no
save can begin before the one before has ended, so the whole time of a save is the least interval.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median

FIRST = 10
"""Steps until the first save, which shows what a save costs."""
_SAVES = 5
_STEPS = 64
_NOTABLE = 1.2


def best_interval(cost: float, mtbf: float) -> float:
    """Seconds of training from one save to the next that lose the least time.

    Args:
        cost: seconds that a save keeps training from its work.
        mtbf: mean seconds between two failures of the run.
    """
    if cost >= 2 * mtbf:
        return mtbf
    part = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - cost


class Interval:
    """The number of steps between saves, from what steps and saves were measured to take.

    Args:
        mtbf: mean seconds between two failures of the run.
        clock: tells seconds.
    """

    def __init__(self, mtbf: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._mtbf = mtbf
        self._clock = clock
        self._step_times: deque[float] = deque(maxlen=_STEPS)
        self._stalls: deque[float] = deque(maxlen=_SAVES)
        self._totals: deque[float] = deque(maxlen=_SAVES)
        self._before: float | None = None
        self._saved_at = 0
        self._told = 0

    def step(self) -> None:
        """A step has ended."""
        now = self._clock()
        if self._before is not None:
            self._step_times.append(now - self._before)
        self._before = now

    def begun(self, step: int) -> None:
        """A save was begun after this step, or training begins with it; training goes on now."""
        self._saved_at = step
        self._before = self._clock()

    def measured(self, stall: float, total: float) -> None:
        """What a save took: seconds that training stood still, and seconds in all."""
        self._stalls.append(stall)
        self._totals.append(total)

    def due(self, step: int) -> bool:
        """Whether to save after this step."""
        return step - self._saved_at >= self.steps

    @property
    def steps(self) -> int:
        """Steps from one save to the next."""
        if not self._stalls or not self._step_times:
            return FIRST
        return max(1, math.ceil(self._seconds() / max(median(self._step_times), 1e-9)))

    def news(self) -> dict[str, object] | None:
        """The interval and its reason, when it is new or has changed by a fifth."""
        steps = self.steps
        if not self._stalls or not self._step_times or max(steps, self._told) < _NOTABLE * min(steps, self._told):
            return None
        self._told = steps
        stall, total, hours = median(self._stalls), median(self._totals), self._mtbf / 3600
        reason = f"a save stalls training for {_short(stall)} s, one failure in {hours:g} h expected (Young/Daly)"
        if self._seconds() == total:
            reason += f", and takes {_short(total)} s, which is the least"
        seconds = steps * median(self._step_times)
        text = f"checkpoint every {steps} step{'s' if steps > 1 else ''} ({_short(seconds)} s): {reason}"
        return {"steps": steps, "interval": seconds, "stall": stall, "total": total, "mtbf_hours": hours, "text": text}

    def _seconds(self) -> float:
        return max(best_interval(median(self._stalls), self._mtbf), median(self._totals))


def _short(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"
