"""Shares in proportion to the speed of each worker: whole numbers from measured seconds, no clock.

Shares follow the median of several steps, and change only where that is clearly worth it. Recomputed after each step
they would chase noise, and a worker that is slow in one step would make two steps slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heapreplace
from statistics import median

from paceline.schedule.shares import even

WINDOW = 7
"""Steps in the median."""
_LEAST = 4
"""Steps measured before the first change."""
_WORTH = 1.03
"""A change must make the step faster by this factor."""


class SpeedShares:
    """The speed of each worker, and the shares that follow from it.

    Args:
        workers: the number of workers.
        total: microbatches of a full step.
        fits: whether shares follow the speed; else they are even.
    """

    def __init__(self, workers: int, total: int, fits: bool) -> None:
        self._measured: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(workers)]
        self._total = total
        self._fits = fits
        self.counts = tuple(map(len, even(total, workers)))

    def observe(self, seconds: Sequence[float], counts: Sequence[int]) -> bool:
        """Add the measurements of a step: how long each worker computed, and how many microbatches.

        Returns:
            whether the shares change.
        """
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
        """Seconds per microbatch of each worker; 0 before its first measurement."""
        return [median(measured) if measured else 0.0 for measured in self._measured]

    def shares(self, total: int) -> tuple[range, ...]:
        """The contiguous shares of ``total`` microbatches, in rank order; a short step in proportion."""
        if total == self._total:
            return contiguous(self.counts)
        if not all(self.counts):
            return even(total, len(self.counts))
        return contiguous(fit_counts(total, [1 / count for count in self.counts]))


def fit_counts(total: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """How many microbatches each worker takes, so that the last one finishes as early as possible.

    >>> fit_counts(12, [1.0, 1.0, 2.0, 2.0])
    (4, 4, 2, 2)
    """
    counts = [0] * len(seconds)
    ends = [(each, worker) for worker, each in enumerate(seconds)]  # when each worker would end with one more
    heapify(ends)
    for _ in range(total):
        worker = ends[0][1]
        counts[worker] += 1
        heapreplace(ends, ((counts[worker] + 1) * seconds[worker], worker))
    return tuple(counts)


def contiguous(counts: Sequence[int]) -> tuple[range, ...]:
    """Shares of these sizes, one after the other.

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
