"""Direct reduce-scatter and all-gather between all workers, with the same number of bytes as a ring.

A bucket is cut into a chunk for each worker and exchanged in two rounds::

    reduce-scatter    worker q receives chunk q of every node, adds the nodes up along the tree, divides
    all-gather        worker q sends its chunk, now the mean, to all others

With one node per worker, a worker sends and receives 2(P-1)/P times the bucket's bytes for any number of workers P.
This is the minimum (Patarasuk and Yuan, 2009). Each additional node adds (P-1)/P.

With parameter servers, a bucket is a single chunk of one server. ``copies`` limits the receivers of its mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from paceline.comm.collectives.subgroup import Subgroup
from paceline.comm.reduction.buckets import Bucket, Layout
from paceline.comm.reduction.exchange import TAGS, Messages, Parts, Phase, in_order, nothing
from paceline.comm.transport.base import Message
from paceline.comm.world import World
from paceline.schedule.link_shares import full
from paceline.schedule.tree import Node


class DirectExchange:
    """Exchange in which each worker sends every other worker its chunk.

    Args:
        world: all workers or a subgroup.
        tags: first tag to use. Each bucket takes :data:`TAGS` tags.
        shares: fraction of a bucket that each rank adds up. Defaults to equal fractions.
        homes: rank of the server of each tensor. Defaults to no servers.
        copies: ranks that receive the means of each server that has copies. By default all ranks receive all means.
        windowed: see :class:`Layout`.
        spread: ranks that receive the results of a server. Defaults to all others.
    """

    kind = "tree"

    def __init__(
        self,
        world: World | Subgroup,
        tags: int = 0,
        shares: Sequence[float] | None = None,
        homes: Sequence[int] | None = None,
        copies: Mapping[int, Sequence[int]] | None = None,
        windowed: bool = False,
        spread: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self._rank, self._size, self._tags = world.rank, world.size, tags
        self._peers = [peer for peer in range(world.size) if peer != world.rank]
        self._givers = self._takers = self._peers
        self._spread_to = spread or {
            rank: [one for one in range(world.size) if one != rank] for rank in range(world.size)
        }
        if copies is not None:
            self._givers = [peer for peer in self._peers if world.rank in copies.get(peer, ())]
            self._takers = [*copies.get(world.rank, ())]
        # A bucket keeps the link of one server busy, and a server that waits sends nothing to others. Memory may hold
        # workers up at other moments, and so change the order of messages: that takes a transport with tags.
        eager = homes is not None and isinstance(world, World) and not world.transport.capabilities.ordered
        equal = shares or [1 / world.size] * world.size
        self.layout = Layout(full(world.size), equal, homes=homes, windowed=windowed, eager=eager)

    @property
    def before(self) -> tuple[Phase, ...]:
        return (self._scatter,)

    @property
    def after(self) -> tuple[Phase, ...]:
        return (nothing,)

    def open(self, buckets: list[Bucket]) -> None:
        self._buckets = buckets

    def begin(self, nodes: list[list[Node]]) -> None:
        self._nodes, self._order = nodes, in_order(nodes, range(self._size))
        count = max(map(len, nodes))
        if not self.layout.windowed:
            for bucket in self._buckets:
                while len(bucket.flats) < count:
                    bucket.add_flat()
                self._open_inbox(bucket, count)
            return
        while self._buckets and len(self._buckets[0].flats) < count:
            size = max(bucket.start + bucket.nbytes for bucket in self._buckets)
            memory = torch.zeros(size, dtype=torch.uint8, device=self._buckets[0].examples[0].device)
            for bucket in self._buckets:
                if bucket.home in (self._rank, *self._givers) and not bucket.flats:
                    bucket.put_means(bucket.zeros())
                bucket.add_flat(memory[bucket.start : bucket.start + bucket.nbytes].view(bucket.examples[0].dtype))

    def _open_inbox(self, bucket: Bucket, count: int) -> None:
        """Make room for the parts of ``count`` nodes of each peer."""
        while len(bucket.inbox) < count * self._size:
            bucket.inbox.append(torch.empty_like(bucket.flats[0][bucket.chunk(self._rank)]))

    def expect(self, bucket: Bucket) -> list[Message]:
        if self.layout.windowed:
            self._open_inbox(bucket, max(map(len, self._nodes)))
        nodes = [(peer, index) for peer in self._peers for index in range(len(self._nodes[peer]))]
        tag = self._tags + bucket.index * TAGS
        return [Message(self._received(bucket, peer, index), peer, tag + index) for peer, index in nodes]

    def _scatter(self, bucket: Bucket) -> Iterable[Messages]:
        """Send each worker its chunk of this worker's nodes."""
        tag, own = self._tags + bucket.index * TAGS, bucket.flats[: len(self._nodes[self._rank])]
        sends = [
            Message(flat[bucket.chunk(peer)], peer, tag + index)
            for peer in self._peers
            for index, flat in enumerate(own)
        ]
        return [(sends, [] if self.layout.eager else self.expect(bucket))]

    def collect(self, bucket: Bucket) -> Iterator[tuple[torch.Tensor, Parts]]:
        if bucket.home in (None, self._rank):
            mine = bucket.chunk(self._rank)
            parts = [
                (node, bucket.flats[index][mine] if rank == self._rank else self._received(bucket, rank, index))
                for node, rank, index in self._order
            ]
            yield bucket.means[mine], parts
            if self.layout.windowed:
                bucket.inbox.clear()

    def deliver(self, bucket: Bucket) -> Iterable[Messages]:
        mean, tag = bucket.means, self._tags + bucket.index * TAGS + TAGS - 1
        mine = mean[bucket.chunk(self._rank)]
        receives = [Message(mean[bucket.chunk(peer)], peer, tag) for peer in self._givers]
        return [([Message(mine, peer, tag) for peer in self._takers], receives)]

    def spread(self, bucket: Bucket) -> Iterable[Messages]:
        assert bucket.home is not None
        flat, tag = bucket.means, self._tags + bucket.index * TAGS + TAGS - 2
        if bucket.home == self._rank:
            return [([Message(flat, peer, tag) for peer in self._spread_to[bucket.home]], [])]
        return [([], [Message(flat, bucket.home, tag)] if self._rank in self._spread_to[bucket.home] else [])]

    def spreads_here(self, bucket: Bucket) -> bool:
        return bucket.home is not None and self._rank in self._spread_to[bucket.home]

    def await_spread(self, bucket: Bucket) -> None:
        """Do nothing, because the executor has waited for the message."""

    def _received(self, bucket: Bucket, rank: int, index: int) -> torch.Tensor:
        """Return the buffer for this worker's chunk of a node of another rank."""
        return bucket.inbox[index * self._size + rank]
