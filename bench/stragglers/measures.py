"""From what the workers recorded to times over the ideal: pure functions.

With a rule with common steps each step gives a ratio: its seconds over the ideal ones. With an asynchronous rule each
window of WINDOW steps gives one: what the workers could have computed in that time, over what counted. The whole run
gives one in both cases.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from patterns import Pattern

WINDOW = 8
"""Steps of a window of an asynchronous rule: as many as are under way at the same time."""
WARM = 2
"""First steps that are left out: they allocate and decide."""


@dataclass(frozen=True)
class Ratios:
    """Times over the ideal.

    Attributes:
        whole: of the whole run but its first steps.
        median: of the steps, or of the windows.
        tail: the 99th percentile of them.
        each: all of them, in order.
    """

    whole: float
    median: float
    tail: float
    each: tuple[float, ...]


def of_steps(ends: Sequence[Sequence[float]], pattern: Pattern, microbatches: int, base: float) -> Ratios:
    """The ratios of a rule with common steps.

    Args:
        ends: for each worker, when each step ended.
        pattern: the slowness that there was.
        microbatches: of a step.
        base: seconds of a microbatch.
    """
    ended = [max(column) for column in zip(*ends, strict=True)]
    took = [after - before for before, after in itertools.pairwise(ended)][WARM - 1 :]
    ideal = [pattern.ideal_seconds(step, microbatches, base) for step in range(WARM, len(ended))]
    each = [seconds / best for seconds, best in zip(took, ideal, strict=True)]
    return Ratios(sum(took) / sum(ideal), median(each), percentile(each, 99), tuple(each))


def of_microbatches(done: Sequence[float], pattern: Pattern, microbatches: int, base: float) -> Ratios:
    """The ratios of an asynchronous rule.

    Args:
        done: when each microbatch that counted was done, in order, in seconds since the beginning.
        pattern: the slowness that there was.
        microbatches: of a step.
        base: seconds of a microbatch.
    """
    slot = microbatches * base / pattern.workers
    marks = [0.0, *done[microbatches - 1 :: microbatches]]

    def ratio(first: int, last: int) -> float:
        possible = pattern.possible(marks[first], marks[last], slot, base)
        return possible / ((last - first) * microbatches)

    windows = [ratio(step, step + WINDOW) for step in range(WARM, len(marks) - WINDOW)]
    each = windows or [ratio(WARM, len(marks) - 1)]
    return Ratios(ratio(WARM, len(marks) - 1), median(each), percentile(each, 99), tuple(each))


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that ``percent`` percent of all values do not exceed.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 50)
    2.0
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def miscounted(tally: Sequence[float], once: float) -> int:
    """How many samples did not count exactly once, from weights that fall by about ``once`` each time.

    About: an update of some rules uses a few microbatches more or fewer, and divides by the samples that it uses.
    """
    return sum(round(-value / once) != 1 for value in tally)


def settled_after(each: Sequence[float], limit: float, length: int = 5) -> int | None:
    """The first step from which the median of the next ``length`` steps is within the limit; none if there is none.

    >>> settled_after([2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0], 1.06)
    1
    """
    for step in range(len(each) - length + 1):
        if median(each[step : step + length]) <= limit:
            return step
    return None
