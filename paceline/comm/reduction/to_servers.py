"""The gradients of a synchronous step on their way to servers, each of which adds up those of its own tensors."""

from __future__ import annotations

import torch

from paceline.comm.reduction.bucketed import TAGS, Bucket, BucketedReduction
from paceline.comm.reduction.shared_memory import SharedMemoryReduction
from paceline.comm.shm.arena import SharedMemory
from paceline.comm.transport.base import Message
from paceline.comm.world import World
from paceline.events import EventLog


class _WholeBuckets(BucketedReduction):
    """Each bucket is for one server, which alone has the mean."""

    _homes: list[int]
    """For each tensor the rank of its server."""

    def _split(self) -> list[list[int]]:
        return [
            [member for member in bucket if self._homes[member] == home]
            for bucket in super()._split()
            for home in sorted({self._homes[member] for member in bucket})
        ]

    def _home(self, bucket: Bucket) -> int:
        return self._homes[bucket.members[0]]

    def _chunk(self, bucket: Bucket, rank: int) -> slice:
        return slice(0, bucket.cuts[-1] if rank == self._home(bucket) else 0)

    def _reduce(self, bucket: Bucket) -> None:
        if self._world.rank == self._home(bucket):
            super()._reduce(bucket)
        else:
            self._agree(bucket)


class PushReduction(_WholeBuckets, SharedMemoryReduction):
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

    def _deliver(self, bucket: Bucket, mean: torch.Tensor) -> None:
        self._announce_means(bucket)

    def _await_means(self, bucket: Bucket) -> None:
        """Until the server has read what this worker pushed, which the next step overwrites."""
        self._shared_memory.wait(self._flag + 2 * bucket.index + 1, self._steps, places=(self._home(bucket),))


class NetworkPushReduction(_WholeBuckets):
    """The same between machines: each worker sends whole buckets to their server.

    Args:
        world: the workers.
        tensors: examples of what will be summed, in the order in which they become ready.
        homes: for each tensor the rank of its server.
        copies: for each server the rank that gets the means, too; none if it is not in here.
        events: where to record each bucket.
        tags: the first tag to use.
    """

    def __init__(
        self,
        world: World,
        tensors: list[torch.Tensor],
        homes: list[int],
        copies: dict[int, int],
        events: EventLog,
        tags: int,
    ) -> None:
        self._homes, self._copies = homes, copies
        super().__init__(world, tensors, events, "pushes", tags)

    def _add_flats(self, count: int) -> None:
        size, rank = self._world.size, self._world.rank
        for bucket in self._buckets:
            example, elements = self._example(bucket), bucket.cuts[-1]
            while len(bucket.flats) < count:
                self._add_flat(bucket, torch.zeros(elements, dtype=example.dtype, device=example.device))
            home = self._home(bucket)
            room = count * size if rank == home else int(self._copies.get(home) == rank)
            while len(bucket.inbox) < room:
                bucket.inbox.append(example.new_empty(elements))

    def _scatter(self, bucket: Bucket) -> None:
        world, home, tag = self._world, self._home(bucket), self._tag(bucket)
        sends, receives = [], []
        if world.rank != home:
            sends = [Message(bucket.flats[place], home, tag + place) for place in range(len(self._nodes[world.rank]))]
            if self._copies.get(home) == world.rank:
                receives = [Message(bucket.inbox[0], home, tag + TAGS - 1)]
        else:
            receives = [
                Message(bucket.inbox[place * world.size + peer], peer, tag + place)
                for peer in range(world.size)
                if peer != home
                for place in range(len(self._nodes[peer]))
            ]
        self._start_transfers(bucket, sends, receives)

    def _deliver(self, bucket: Bucket, mean: torch.Tensor) -> None:
        if self._world.rank in self._copies:
            copy = Message(mean, self._copies[self._world.rank], self._tag(bucket) + TAGS - 1)
            self._start_transfers(bucket, [copy], [])

    def _await_means(self, bucket: Bucket) -> None:
        super()._await_means(bucket)
        if self._copies.get(self._home(bucket)) == self._world.rank:
            bucket.flats[0].copy_(bucket.inbox[0])

    def _bytes_sent(self, bucket: Bucket) -> int:
        if self._world.rank == self._home(bucket):
            flats = int(self._world.rank in self._copies)
        else:
            flats = len(self._nodes[self._world.rank])
        return flats * bucket.flats[0].nbytes
