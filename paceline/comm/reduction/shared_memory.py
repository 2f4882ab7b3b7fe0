"""Exchange between the workers of one machine through shared memory, without copies through sockets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from paceline.comm.reduction.buckets import Bucket, Layout
from paceline.comm.reduction.exchange import Parts, Phase, in_order
from paceline.comm.shm.arena import SharedMemory
from paceline.comm.shm.tensors import aligned
from paceline.comm.transport.base import Message
from paceline.schedule.link_shares import SHARED_WINDOWED, SMALLEST_BUCKET
from paceline.schedule.tree import Node


class SharedBuckets:
    """Buckets in shared memory of one machine's workers, with two flags each: sums are written, means are written.

        windowed: whether servers keep their means outside of the flats, see :class:`Layout`.

    Attributes:
        flats: flat of every worker of this machine, by bucket and node.
    """

    def __init__(self, memory: SharedMemory, windowed: bool = False) -> None:
        self._memory, self._windowed = memory, windowed
        self._steps = 0

    def open(self, buckets: list[Bucket]) -> None:
        """Reserve the flags of the buckets. All workers must call this method in the same order."""
        self._buckets = buckets
        self._flag = self._memory.reserve(2 * len(buckets))
        self.flats: list[list[list[torch.Tensor]]] = [[] for _ in buckets]

    def begin(self, count: int) -> None:
        """Start a step, and make room in each bucket for ``count`` nodes of each worker."""
        self._steps += 2  # means are announced with the first number of a step, spread values with the second
        if self._windowed and self._buckets and not self._buckets[0].mean_views:
            self._keep_means()
        while self._buckets and len(self._buckets[0].flats) < count:
            blocks = self._memory.share(max(bucket.start + bucket.nbytes for bucket in self._buckets))
            for bucket in self._buckets:
                flats = [_flat(bucket, block, bucket.start) for block in blocks]
                self.flats[bucket.index].append(flats)
                bucket.add_flat(flats[self._memory.place])

    def _keep_means(self) -> None:
        """Make room for the means of each bucket in the memory of its server."""
        starts, ends = [], [0] * len(self._memory.ranks)
        for bucket in self._buckets:
            assert bucket.home is not None
            starts.append(ends[bucket.home])
            ends[bucket.home] += aligned(bucket.nbytes)
        blocks = self._memory.share(max(ends))
        for bucket, start in zip(self._buckets, starts, strict=True):
            bucket.put_means(_flat(bucket, blocks[bucket.home or 0], start))

    def announce_parts(self, bucket: Bucket) -> None:
        """Announce that this worker has written its flats of a bucket."""
        self._memory.announce(self._flag + 2 * bucket.index, self._steps)

    def await_parts(self, bucket: Bucket) -> None:
        """Wait until all workers of this machine have announced their sums."""
        self._memory.wait(self._flag + 2 * bucket.index, self._steps)

    def announce_means(self, bucket: Bucket, spread: bool = False) -> None:
        """Announce that this worker has read the parts that it adds up, and has written its means for the others.

        Args:
            spread: whether the server has spread other values after the means.
        """
        self._memory.announce(self._flag + 2 * bucket.index + 1, self._steps + spread)

    def await_means(self, bucket: Bucket, spread: bool = False) -> None:
        """Wait until all workers of this machine, or the bucket's server alone, have announced the means."""
        places = None if bucket.home is None else (bucket.home,)
        self._memory.wait(self._flag + 2 * bucket.index + 1, self._steps + spread, places)


def _flat(bucket: Bucket, block: memoryview, start: int) -> torch.Tensor:
    return torch.frombuffer(block, dtype=bucket.examples[0].dtype, count=bucket.cuts[-1], offset=start)


class SharedMemoryExchange:
    """Exchange in which each worker reads its chunk of the others' nodes, and writes the mean into the others' flats.

    Chunk q of every flat belongs to worker q after the flat's owner has announced the bucket and until worker q has
    announced the mean. With parameter servers, a bucket is a single chunk of its server, which keeps the mean.

    Args:
        homes: rank of the server of each tensor. Defaults to no servers.
        windowed: see :class:`Layout`.
        copies: ranks that also get the means of each server that has copies.
    """

    kind = "tree in shared memory"

    def __init__(
        self,
        memory: SharedMemory,
        homes: Sequence[int] | None = None,
        windowed: bool = False,
        copies: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self._copies = copies or {}
        self._rank, self._size = memory.place, len(memory.ranks)
        self._shared, self._windowed = SharedBuckets(memory, windowed), windowed
        self.open = self._shared.open
        size = SHARED_WINDOWED if windowed else SMALLEST_BUCKET
        self.layout = Layout(size, [1 / self._size] * self._size, homes=homes, windowed=windowed)

    def expect(self, bucket: Bucket) -> list[Message]:
        """Return nothing, because parts stay where they were written."""
        return []

    @property
    def before(self) -> tuple[Phase, ...]:
        return (self._shared.announce_parts,)

    @property
    def after(self) -> tuple[Phase, ...]:
        return (self._shared.await_means,)

    def begin(self, nodes: list[list[Node]]) -> None:
        self._own, self._order = len(nodes[self._rank]), in_order(nodes, range(self._size))
        self._shared.begin(max(map(len, nodes)))

    def collect(self, bucket: Bucket) -> Iterator[tuple[torch.Tensor, Parts]]:
        if bucket.home in (None, self._rank):
            self._shared.await_parts(bucket)
            flats, mine = self._shared.flats[bucket.index], bucket.chunk(self._rank)
            yield bucket.means[mine], [(node, flats[index][rank][mine]) for node, rank, index in self._order]

    def deliver(self, bucket: Bucket) -> None:
        """Write the mean of this worker's chunk into the flats of all others."""
        chunk = bucket.chunk(self._rank)
        mine = bucket.means[chunk]
        bucket.sent = self._own * (bucket.nbytes - mine.nbytes)
        takers: Sequence[int] = range(self._size)
        if bucket.home is not None:  # the copies of a server read means outside of the flats where they are
            takers = () if self._windowed else self._copies.get(bucket.home, ())
        if bucket.home in (None, self._rank):
            for rank in takers:
                if rank != self._rank:
                    self._shared.flats[bucket.index][0][rank][chunk].copy_(mine)
                    bucket.sent += mine.nbytes
        if bucket.home in (None, self._rank):
            self._shared.announce_means(bucket)

    def spread(self, bucket: Bucket) -> None:
        """See :class:`OwnerExchange`. The flats of the others are free, because the server has read their parts.

        Means outside of the flats stay where they are: the others read them there.
        """
        if bucket.home == self._rank and self._windowed:
            bucket.sent += (self._size - 1) * bucket.nbytes
            self._shared.announce_means(bucket, spread=True)
        elif bucket.home == self._rank:
            mine = bucket.flats[0]
            for rank, flat in enumerate(self._shared.flats[bucket.index][0]):
                if rank != self._rank:
                    flat.copy_(mine)
                    bucket.sent += mine.nbytes
            self._shared.announce_means(bucket, spread=True)

    def spreads_here(self, bucket: Bucket) -> bool:
        return bucket.home != self._rank

    def await_spread(self, bucket: Bucket) -> None:
        self._shared.await_means(bucket, spread=True)
