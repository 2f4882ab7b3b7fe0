"""Sums over workers on several machines: through memory inside of each machine, over the network between them.

The workers of a machine first add up what they have, in shared memory, to as few nodes of the canonical tree as can
be: one, if their shares are a whole node together. Only these cross the network. So a network card carries about 2 G
bytes in each direction for G bytes of gradients, whatever the number L of workers of a machine, instead of 2 L G.

A bucket is cut into a chunk for each machine and column; each column of a machine is served by one of its workers.
Two machines of two workers each::

    chunk            (A,0)   (A,1)   (B,0)   (B,1)
    1. announce      a0, a1 and b0, b1 are in the memory of their machines
    2. inside        worker a0 adds a0+a1 of chunks (A,0) and (B,0), a1 of (A,1) and (B,1); the same on B
    3. across        a0 sends the sum of (B,0) to b0, which sends that of (A,0) to a0; a1 and b1 the same
    4. mean          a0 has all sums of (A,0): it adds along the tree, divides, and sends the mean to b0
    5. inside        each worker gives the means it has to the others of its machine

The sums are those of the tree, so the bits are those of all other ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch

from paceline.comm.reduction.bucketed import TAGS, Bucket, BucketedReduction, Divisor
from paceline.comm.reduction.division import divide
from paceline.comm.reduction.shared_memory import SharedMemoryReduction
from paceline.comm.shm.arena import SharedMemory
from paceline.comm.transport.base import Message
from paceline.comm.world import World
from paceline.events import EventLog
from paceline.schedule.tree import Node, first_of, fold, total

Sums = list[tuple[Node, torch.Tensor]]


class HierarchicalReduction(SharedMemoryReduction):
    """The same sums over several machines, each of which sends the nodes of all its workers together.

    Args:
        world: the workers, on the machines ``world.hosts``.
        memory: that those of this machine share.
        tensors, events, name, tags, bucket_bytes: see :class:`BucketedReduction`.
    """

    kind = "hierarchical tree"

    def __init__(
        self,
        world: World,
        memory: SharedMemory,
        tensors: list[torch.Tensor],
        events: EventLog,
        name: str,
        tags: int = 0,
        bucket_bytes: int | None = None,
    ) -> None:
        self._hosts = world.hosts
        self._host = world.hosts.index(memory.ranks)
        self._columns = max(map(len, world.hosts))
        self._served = [column for column in range(self._columns) if self._server(self._host, column) == world.rank]
        self._others = [host for host in range(len(world.hosts)) if host != self._host]
        super().__init__(world, memory, tensors, events, name, tags, bucket_bytes)
        self._sums: dict[tuple[int, int], Sums] = {}
        self._phases = (self._scatter, self._send_sums, self._reduce, self._spread, self._await_means)

    def _server(self, host: int, column: int) -> int:
        """The rank that serves a column of a machine."""
        return self._hosts[host][column % len(self._hosts[host])]

    @property
    def _chunks(self) -> int:
        return len(self._hosts) * self._columns

    def _full(self) -> int:
        return BucketedReduction._full(self)

    def _chunk_shares(self, hosts: Sequence[tuple[int, ...]], shares: list[float]) -> list[float]:
        return [share / self._columns for share in shares for _ in range(self._columns)]

    def _piece(self, bucket: Bucket, host: int, column: int) -> slice:
        place = host * self._columns + column
        return slice(*bucket.cuts[place : place + 2])

    def begin(self, nodes: list[list[Node]], divisor: Divisor, check: Callable[[], None] | None = None) -> None:
        self._host_nodes = [
            [node for node, _ in fold([(node, None) for node in _in_order(nodes, ranks)], lambda *_: None)]
            for ranks in self._hosts
        ]
        super().begin(nodes, divisor, check)
        room = max(map(len, self._host_nodes)) * self._columns * len(self._hosts)
        for bucket in self._buckets:
            while len(bucket.inbox) < room:
                piece = self._piece(bucket, self._host, len(bucket.inbox) % self._columns)
                bucket.inbox.append(torch.empty_like(bucket.flats[0][piece]))

    def _send_sums(self, bucket: Bucket) -> None:
        """Add up what this machine has, and send each machine the sums of its chunks."""
        self._await_parts(bucket)
        for column in self._served:
            for host in range(len(self._hosts)):
                sums = self._sums_here(bucket, self._piece(bucket, host, column))
                if host == self._host:
                    self._sums[bucket.index, column] = sums
                else:
                    self._exchange_sums(bucket, host, column, sums)

    def _sums_here(self, bucket: Bucket, piece: slice) -> Sums:
        ranks = self._hosts[self._host]
        parts = {
            node: self._seen[bucket.index][index][place][piece]
            for place, rank in enumerate(ranks)
            for index, node in enumerate(self._nodes[rank])
        }
        return fold([(node, parts[node]) for node in _in_order(self._nodes, ranks)], torch.Tensor.add_)

    def _exchange_sums(self, bucket: Bucket, host: int, column: int, sums: Sums) -> None:
        peer = self._server(host, column)
        sends = [Message(value, peer, self._sum_tag(bucket, index, column)) for index, (_, value) in enumerate(sums)]
        receives = [
            Message(self._received(bucket, host, column, index), peer, self._sum_tag(bucket, index, column))
            for index in range(len(self._host_nodes[host]))
        ]
        self._start_transfers(bucket, sends, receives)

    def _sum_tag(self, bucket: Bucket, index: int, column: int) -> int:
        return self._tag(bucket) + index * self._columns + column

    def _received(self, bucket: Bucket, host: int, column: int, index: int) -> torch.Tensor:
        """Where a sum of another machine goes."""
        return bucket.inbox[(index * len(self._hosts) + host) * self._columns + column]

    def _reduce(self, bucket: Bucket) -> None:
        """Add up this worker's chunks along the tree, divide, and give them to all machines."""
        divisor = self._agree(bucket)
        BucketedReduction._await_parts(self, bucket)
        sends, receives = [], []
        for column in self._served:
            mean = self._mean_of(bucket, column, divisor)
            tag = self._tag(bucket) + TAGS - 1 - column
            for host in self._others:
                peer = self._server(host, column)
                sends.append(Message(mean, peer, tag))
                receives.append(Message(bucket.flats[0][self._piece(bucket, host, column)], peer, tag))
        self._start_transfers(bucket, sends, receives)

    def _mean_of(self, bucket: Bucket, column: int, divisor: torch.Tensor | float) -> torch.Tensor:
        sums = self._sums.pop((bucket.index, column))
        for host in self._others:
            for index, node in enumerate(self._host_nodes[host]):
                sums.append((node, self._received(bucket, host, column, index)))
        sums.sort(key=lambda one: first_of(one[0]))
        piece = self._piece(bucket, self._host, column)
        return divide(total(sums, torch.Tensor.add_), divisor, out=bucket.flats[0][piece])

    def _spread(self, bucket: Bucket) -> None:
        """Give the means of this worker's columns to the others of its machine."""
        BucketedReduction._await_means(self, bucket)
        for place, flat in enumerate(self._seen[bucket.index][0]):
            if place != self._shared_memory.place:
                for column in self._served:
                    for host in range(len(self._hosts)):
                        piece = self._piece(bucket, host, column)
                        flat[piece].copy_(bucket.flats[0][piece])
        self._announce_means(bucket)

    def _bytes_sent(self, bucket: Bucket) -> int:
        """To other machines."""
        sums, sent = len(self._host_nodes[self._host]), 0
        for column in self._served:
            pieces = [bucket.flats[0][self._piece(bucket, host, column)].nbytes for host in range(len(self._hosts))]
            mine = pieces.pop(self._host)
            sent += sums * sum(pieces) + len(self._others) * mine
        return sent


def _in_order(nodes: list[list[Node]], ranks: tuple[int, ...]) -> list[Node]:
    """The nodes that these ranks hold, from left to right."""
    return sorted(chain.from_iterable(nodes[rank] for rank in ranks), key=first_of)
