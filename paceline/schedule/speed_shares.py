"""Shares in proportion to the speed of each worker, computed from measured seconds. No clock.

Shares follow the median of several steps and change only if the gain is significant. Shares recomputed after each step
would follow noise, and a worker that is slow in one step would make two steps slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heapreplace
from statistics import median

from paceline.schedule.shares import even

WINDOW = 7  # number of steps in the median
_LEAST = 4  # number of measured steps before the first change
_WORTH = 1.03  # minimum speedup of the step for a change of the shares


class SpeedShares:
    """Measured speed of each worker, and the resulting shares.

    Args:
        total: number of microbatches of a full step.
        fits: whether shares follow the speed. Otherwise they are even.
    """

    def __init__(self, workers: int, total: int, fits: bool) -> None:
        self._measured: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(workers)]
        self._total, self._fits = total, fits
        self.counts = tuple(map(len, even(total, workers)))

    def observe(self, seconds: Sequence[float], counts: Sequence[int]) -> bool:
        """Add the seconds and microbatches that each worker computed. Return whether the shares have changed."""
        for measured, spent, count in zip(self._measured, seconds, counts, strict=True):
            if count:
                measured.append(spent / count)
        if not self._fits or min(map(len, self._measured)) < _LEAST:
            return False
        fitting = fit_counts(self._total, self.seconds())
        if _slowest(self.counts, self.seconds()) <= _WORTH * _slowest(fitting, self.seconds()):
            return False
        self.counts = fitting
        return True

    def seconds(self) -> list[float]:
        """Return each worker's median seconds per microbatch, or 0 before its first measurement."""
        return [median(measured) if measured else 0.0 for measured in self._measured]

    def shares(self, total: int) -> tuple[range, ...]:
        """Return contiguous shares in rank order, for a short step proportional ones, or even ones if any is empty."""
        if total == self._total:
            return contiguous(self.counts)
        if not all(self.counts):
            return even(total, len(self.counts))
        return contiguous(fit_counts(total, [1 / count for count in self.counts]))


def fit_counts(total: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """Return the number of microbatches per worker that lets the last worker finish as early as possible.

    >>> fit_counts(12, [1.0, 1.0, 2.0, 2.0])
    (4, 4, 2, 2)
    """
    counts = [0] * len(seconds)
    ends = [(each, worker) for worker, each in enumerate(seconds)]  # end time with an additional microbatch
    heapify(ends)
    for _ in range(total):
        worker = ends[0][1]
        counts[worker] += 1
        heapreplace(ends, ((counts[worker] + 1) * seconds[worker], worker))
    return tuple(counts)


def contiguous(counts: Sequence[int]) -> tuple[range, ...]:
    """Return contiguous shares of these sizes.

    >>> contiguous([2, 0, 1])
    (range(0, 2), range(2, 2), range(2, 3))
    """
    shares, start = [], 0
    for count in counts:
        shares.append(range(start, start + count))
        start += count
    return tuple(shares)


def _slowest(counts: Sequence[int], seconds: Sequence[float]) -> float:
    return max(count * each for count, each in zip(counts, seconds, strict=True))
