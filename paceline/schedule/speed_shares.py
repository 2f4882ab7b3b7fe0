"""How fast each worker is, and the shares of a step that fit: whole numbers from measured seconds, no clock.

Shares follow the median of several steps, and change only where that is clearly worth it: cut anew after each step
they would chase every hiccup, and a worker slow for a single step would make two steps slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heapreplace
from statistics import median

from paceline.schedule.shares import even

WINDOW = 7
"""Steps of which the median is taken."""
_LEAST = 4
"""Steps to be seen before shares change for the first time."""
_WORTH = 1.03
"""The step must get so many times faster by the change."""


class SpeedShares:
    """The pace of each worker, and the shares that follow from it.

    Args:
        workers: how many there are.
        total: microbatches of a whole step.
        fits: whether shares follow the speed; else they are even.
    """

    def __init__(self, workers: int, total: int, fits: bool) -> None:
        self._seen: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(workers)]
        self._total = total
        self._fits = fits
        self.counts = tuple(map(len, even(total, workers)))

    def observe(self, seconds: Sequence[float], counts: Sequence[int]) -> bool:
        """What a step has shown: how long each worker computed, and how many microbatches.

        Returns:
            whether the shares change.
        """
        for seen, spent, count in zip(self._seen, seconds, counts, strict=True):
            if count:
                seen.append(spent / count)
        if not self._fits or min(map(len, self._seen)) < _LEAST:
            return False
        fitting = fit_counts(self._total, self.seconds())
        if _slowest(self.counts, self.seconds()) <= _WORTH * _slowest(fitting, self.seconds()):
            return False
        self.counts = fitting
        return True

    def seconds(self) -> list[float]:
        """Seconds for a microbatch, of each worker; 0 for one that has not been seen yet."""
        return [median(seen) if seen else 0.0 for seen in self._seen]

    def shares(self, total: int) -> tuple[range, ...]:
        """The contiguous shares of so many microbatches, in the order of ranks; fewer in proportion."""
        if total == self._total:
            return contiguous(self.counts)
        if not all(self.counts):
            return even(total, len(self.counts))
        return contiguous(fit_counts(total, [1 / count for count in self.counts]))


def fit_counts(total: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """How many microbatches each worker takes so that the last one ends as early as possible.

    >>> fit_counts(12, [1.0, 1.0, 2.0, 2.0])
    (4, 4, 2, 2)
    """
    counts = [0] * len(seconds)
    ends = [(each, worker) for worker, each in enumerate(seconds)]  # of each worker, with one more than it has
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
    return max(count * pace for count, pace in zip(counts, seconds, strict=True))
