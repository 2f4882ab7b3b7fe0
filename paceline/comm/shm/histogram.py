"""Histogram of small numbers in shared memory. The counts of a worker outlive the worker."""

from __future__ import annotations

from collections import Counter

import torch

from paceline.comm.shm.arena import SharedMemory

_LARGEST = (1 << 14) - 1


class Histogram:
    """Counts of numbers from 0. All workers must create the histogram together."""

    def __init__(self, shared_memory: SharedMemory, rank: int) -> None:
        self._counts = [
            torch.frombuffer(block, dtype=torch.int64, count=_LARGEST + 1)
            for block in shared_memory.share(8 * (_LARGEST + 1))
        ]
        self._own = self._counts[rank]
        self._own.zero_()

    def add(self, number: int) -> None:
        """Count a number. Numbers above the largest bin are counted in the largest bin."""
        self._own[min(number, _LARGEST)] += 1

    def total(self) -> Counter[int]:
        total = torch.stack(self._counts).sum(0)
        return Counter({number: int(total[number]) for number in total.nonzero().flatten().tolist()})
