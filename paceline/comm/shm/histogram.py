"""How often each number came up, counted by each worker where all see it: what one has counted outlives it."""

from __future__ import annotations

from collections import Counter

import torch

from paceline.comm.shm.arena import SharedMemory

_LARGEST = (1 << 14) - 1


class Histogram:
    """Counts from 0 on; all workers make it together.

    Args:
        memory: of the workers.
        rank: of this worker.
    """

    def __init__(self, memory: SharedMemory, rank: int) -> None:
        self._counts = [
            torch.frombuffer(block, dtype=torch.int64, count=_LARGEST + 1) for block in memory.share(8 * (_LARGEST + 1))
        ]
        self._own = self._counts[rank]
        self._own.zero_()

    def add(self, number: int) -> None:
        """It came up once more here; a very large one is counted as the largest that there is room for."""
        self._own[min(number, _LARGEST)] += 1

    def total(self) -> Counter[int]:
        """The counts of all workers together."""
        total = torch.stack(self._counts).sum(0)
        return Counter({number: int(total[number]) for number in total.nonzero().flatten().tolist()})
