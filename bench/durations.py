"""What a fault costs, from the times at which steps were done."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from paceline.observe import ledger

_NEXT_GAPS = 2


def step_seconds(times: Sequence[float]) -> float:
    """The median time from the end of one step to the end of the next; 0 for fewer than two steps."""
    return statistics.median(_gaps(times)) if len(times) > 1 else 0.0


def stall(times: Sequence[float], fault: float, usual: float) -> float:
    """The seconds that a fault cost.

    That is the longest gap between two steps, among the gap with the fault and the two after it, less the usual gap.
    (A worker that is killed after it contributed to a step is missed in the next one only.)

    Args:
        times: when each step was done, in order.
        fault: when it happened.
        usual: seconds between two steps.
    """
    first = max(0, sum(time <= fault for time in times) - 1)
    near = _gaps(times)[first : first + 1 + _NEXT_GAPS]
    return max(0.0, max(near) - usual) if near else 0.0


def trains_after(records: ledger.Records, fault: float) -> float | None:
    """Seconds from a fault until all survivors have a complete state and begin a step; none if none recovered."""
    later = [one for one in records.recovered if one.time > fault and one.survived]
    first = min((one.generation for one in later), default=None)
    return None if first is None else max(one.time for one in later if one.generation == first) - fault


def replaced_after(records: ledger.Records, fault: float) -> float | None:
    """Seconds from a fault until a new worker joined; none if none did."""
    return next((one.time - fault for one in records.recovered if one.time > fault and one.joined), None)


def goodput(times: Sequence[float], began: float, usual: float) -> float:
    """The part of the wall time that the useful steps alone would have taken."""
    wall = times[-1] - began if times else 0.0
    return min(1.0, len(times) * usual / wall) if wall > 0 else 0.0


def percentile(values: Sequence[float], part: float) -> float:
    """The nearest-rank percentile; NaN without values."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


def _gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]
