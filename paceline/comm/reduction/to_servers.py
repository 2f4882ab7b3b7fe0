"""The gradients of a synchronous step on their way to servers, each of which adds up those of its own tensors."""

from __future__ import annotations

import torch

from paceline.comm.reduction.bucketed import Bucket
from paceline.comm.reduction.shared_memory import SharedMemoryReduction
from paceline.comm.shm.arena import SharedMemory
from paceline.comm.world import World
from paceline.events import EventLog


class PushReduction(SharedMemoryReduction):
    """The exchange of ``comm.reduction.shared_memory`` with whole buckets for each server: only there is the mean.

    Args:
        world: the workers.
        shared_memory: that they share.
        tensors: examples of what will be summed, in the order in which they become ready.
        homes: for each tensor the rank of its server.
        events: where to record each bucket.
    """

    def __init__(
        self, world: World, shared_memory: SharedMemory, tensors: list[torch.Tensor], homes: list[int], events: EventLog
    ) -> None:
        self._homes = homes
        super().__init__(world, shared_memory, tensors, events, "pushes")

    def _split(self) -> list[list[int]]:
        return [
            [member for member in bucket if self._homes[member] == home]
            for bucket in super()._split()
            for home in sorted({self._homes[member] for member in bucket})
        ]

    def _home(self, bucket: Bucket) -> int:
        return self._homes[bucket.members[0]]

    def _chunk(self, bucket: Bucket, rank: int) -> slice:
        return slice(0, bucket.chunk * self._world.size if rank == self._home(bucket) else 0)

    def _reduce(self, bucket: Bucket) -> None:
        if self._world.rank == self._home(bucket):
            super()._reduce(bucket)
        else:
            self._agree(bucket)

    def _deliver(self, bucket: Bucket, mean: torch.Tensor) -> None:
        self._announce_means(bucket)

    def _await_means(self, bucket: Bucket) -> None:
        """Until the server has read what this worker pushed, which the next step overwrites."""
        self._shared_memory.wait(self._flag + 2 * bucket.index + 1, self._steps, places=(self._home(bucket),))
