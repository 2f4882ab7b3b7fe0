"""The exchange of workers on one machine: gradients need no copy through a socket."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.comm.reduction.bucketed import SMALLEST_BUCKET, Bucket, BucketedReduction, Divisor
from paceline.comm.shm.arena import SharedMemory
from paceline.comm.shm.tensors import aligned
from paceline.comm.world import World
from paceline.events import EventLog
from paceline.schedule.tree import Node


class SharedMemoryReduction(BucketedReduction):
    """The same sums through shared memory: a worker reads the others' nodes and writes the mean where they want it.

    Chunk q of every buffer belongs to worker q from the moment the buffer's owner has announced the bucket until
    worker q has announced the mean.
    """

    kind = "tree in shared memory"

    def __init__(
        self,
        world: World,
        shared_memory: SharedMemory,
        tensors: list[torch.Tensor],
        events: EventLog,
        name: str,
        tags: int = 0,
        bucket_bytes: int | None = None,
    ) -> None:
        super().__init__(world, tensors, events, name, tags, bucket_bytes)
        self._shared_memory = shared_memory
        self._flag = shared_memory.reserve(2 * len(self._buckets))
        self._steps = 0
        self._seen: list[list[list[torch.Tensor]]] = [[] for _ in self._buckets]
        """For each bucket and each of its flats, that flat of every worker of this machine."""

    def _full(self) -> int:
        return SMALLEST_BUCKET

    def begin(self, nodes: list[list[Node]], divisor: Divisor, check: Callable[[], None] | None = None) -> None:
        self._steps += 1
        super().begin(nodes, divisor, check)

    def _add_flats(self, count: int) -> None:
        while len(self._buckets[0].flats) < count:
            sizes = [bucket.cuts[-1] * self._example(bucket).element_size() for bucket in self._buckets]
            blocks = self._shared_memory.share(sum(map(aligned, sizes)))
            start = 0
            for bucket, size in zip(self._buckets, sizes, strict=True):
                dtype, elements = self._example(bucket).dtype, bucket.cuts[-1]
                flats = [torch.frombuffer(block, dtype=dtype, count=elements, offset=start) for block in blocks]
                self._seen[bucket.index].append(flats)
                self._add_flat(bucket, flats[self._shared_memory.place])
                start += aligned(size)

    def _scatter(self, bucket: Bucket) -> None:
        self._shared_memory.announce(self._flag + 2 * bucket.index, self._steps)

    def _await_parts(self, bucket: Bucket) -> None:
        self._shared_memory.wait(self._flag + 2 * bucket.index, self._steps)

    def _part(self, bucket: Bucket, rank: int, place: int) -> torch.Tensor:
        return self._seen[bucket.index][place][rank][self._chunk(bucket, self._world.rank)]

    def _deliver(self, bucket: Bucket, mean: torch.Tensor) -> None:
        mine = self._chunk(bucket, self._world.rank)
        for rank, flat in enumerate(self._seen[bucket.index][0]):
            if rank != self._world.rank:
                flat[mine].copy_(mean)
        self._announce_means(bucket)

    def _announce_means(self, bucket: Bucket) -> None:
        self._shared_memory.announce(self._flag + 2 * bucket.index + 1, self._steps)

    def _await_means(self, bucket: Bucket) -> None:
        self._shared_memory.wait(self._flag + 2 * bucket.index + 1, self._steps)
