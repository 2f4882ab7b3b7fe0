"""Sums over workers on several machines: through memory within a machine, over the network between machines.

The workers of a machine first add up their nodes in shared memory to as few canonical-tree nodes as possible: a single
node if their shares form a whole node. Only the resulting nodes cross the network. So a network card carries about 2 G
bytes in each direction for G bytes of gradients, whatever the number L of workers per machine, instead of 2 L G.

A bucket is cut into a chunk for each machine and column. One worker of each machine serves each column.
Two machines of two workers each::

    chunk            (A,0)   (A,1)   (B,0)   (B,1)
    1. announce      a0, a1 and b0, b1 are in the memory of their machines
    2. inside        worker a0 adds a0+a1 of chunks (A,0) and (B,0), a1 of (A,1) and (B,1); the same on B
    3. across        a0 sends the sum of (B,0) to b0, and b0 sends the sum of (A,0) to a0; a1 and b1 do the same
    4. mean          a0 has all sums of (A,0): it adds along the tree, divides, and sends the mean to b0
    5. inside        each worker gives its means to the other workers of its machine

The sums follow the canonical tree, so the bits are the same as with every other exchange along the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from paceline.comm.reduction.buckets import Bucket, Layout
from paceline.comm.reduction.exchange import TAGS, Messages, Parts, Phase, in_order, widened
from paceline.comm.reduction.narrow import add_
from paceline.comm.reduction.shared_memory import SharedBuckets
from paceline.comm.shm.arena import SharedMemory
from paceline.comm.transport.base import Message
from paceline.comm.world import World
from paceline.errors import ConfigError
from paceline.schedule.link_shares import full
from paceline.schedule.tree import Node, first_of, fold


class HierarchicalExchange:
    """Exchange in which each machine sends the sums over all its workers.

    Args:
        world: all workers, on the machines ``world.hosts``.
        memory: memory shared by the workers of this machine.
        tags: first tag to use. Each bucket takes :data:`TAGS` tags.
        shares: fraction of a bucket that each machine adds up. Defaults to equal fractions.
        widen: whether sums in half precision are added in float32 inside a machine, and rounded once.
    """

    kind = "hierarchical tree"

    def __init__(
        self,
        world: World,
        memory: SharedMemory,
        tags: int = 0,
        shares: Sequence[float] | None = None,
        widen: bool = False,
    ) -> None:
        self._widen = widen
        self._tags, self._place, self._shared = tags, memory.place, SharedBuckets(memory)
        self._hosts, self._host = world.hosts, world.hosts.index(memory.ranks)
        self._columns = columns = max(map(len, world.hosts))
        self._served = [column for column in range(columns) if self._server(self._host, column) == world.rank]
        self._others = [host for host in range(len(world.hosts)) if host != self._host]
        self._sums: dict[tuple[int, int], Parts] = {}
        """This machine's sums for its own chunk, for each bucket and column in progress."""
        chunks = len(world.hosts) * columns
        of_columns = [share / columns for share in shares or () for _ in range(columns)]
        self.layout = Layout(full(chunks), of_columns or [1 / chunks] * chunks)

    @property
    def before(self) -> tuple[Phase, ...]:
        return (self._shared.announce_parts, self._send_sums)

    @property
    def after(self) -> tuple[Phase, ...]:
        return (self._spread, self._shared.await_means)

    def open(self, buckets: list[Bucket]) -> None:
        self._buckets = buckets
        self._shared.open(buckets)

    def begin(self, nodes: list[list[Node]]) -> None:
        """See :meth:`Exchange.begin`."""
        ranks = self._hosts[self._host]
        self._order = [(node, ranks.index(rank), index) for node, rank, index in in_order(nodes, ranks)]
        self._host_nodes = [
            [node for node, _ in fold([(node, None) for node, *_ in in_order(nodes, ranks)], lambda *_: None)]
            for ranks in self._hosts
        ]
        most = max(map(len, self._host_nodes))
        if (most + 1) * self._columns > TAGS:
            raise ConfigError(
                f"The ranks of a machine are not consecutive, so it has {most} sums to send, each in "
                f"{self._columns} parts: more than the {TAGS - self._columns} messages of a bucket. Number the ranks "
                f"machine by machine, or set reduction='collective'."
            )
        self._shared.begin(max(map(len, nodes)))
        room = most * self._columns * len(self._hosts)
        for bucket in self._buckets:
            while len(bucket.inbox) < room:
                column = len(bucket.inbox) % self._columns
                bucket.inbox.append(torch.empty_like(self._chunk(bucket, self._host, column)))

    def _send_sums(self, bucket: Bucket) -> Iterator[Messages]:
        """Add up the nodes of this machine, and send each machine the sums of its chunks as soon as they are ready."""
        self._shared.await_parts(bucket)
        flats = self._shared.flats[bucket.index]
        for column in self._served:
            tag = self._tags + bucket.index * TAGS + column
            for host, nodes in enumerate(self._host_nodes):
                chunk, peer = bucket.chunk(host * self._columns + column), self._server(host, column)
                held = [(node, flats[index][place][chunk]) for node, place, index in self._order]
                sums = fold(widened(held) if self._widen else held, add_)
                if host == self._host:
                    self._sums[bucket.index, column] = sums
                    continue
                sums = [(node, value.to(bucket.examples[0].dtype)) for node, value in sums]
                inbox = [self._received(bucket, host, column, index) for index in range(len(nodes))]
                yield (
                    [Message(value, peer, tag + index * self._columns) for index, (_, value) in enumerate(sums)],
                    [Message(value, peer, tag + index * self._columns) for index, value in enumerate(inbox)],
                )

    def collect(self, bucket: Bucket) -> Iterator[tuple[torch.Tensor, Parts]]:
        """Yield this machine's chunk of each column that this worker serves, with the sums of all machines."""
        for column in self._served:
            sums = self._sums.pop((bucket.index, column))
            for host in self._others:
                for index, node in enumerate(self._host_nodes[host]):
                    sums.append((node, self._received(bucket, host, column, index)))
            yield self._chunk(bucket, self._host, column), sorted(sums, key=lambda one: first_of(one[0]))

    def deliver(self, bucket: Bucket) -> Iterable[Messages]:
        """Send the means of this worker's chunks to all other machines, and receive theirs."""
        sends, receives = [], []
        for column in self._served:
            mean, tag = self._chunk(bucket, self._host, column), self._tags + bucket.index * TAGS + TAGS - 1 - column
            for host in self._others:
                peer = self._server(host, column)
                sends.append(Message(mean, peer, tag))
                receives.append(Message(self._chunk(bucket, host, column), peer, tag))
        return [(sends, receives)]

    def _spread(self, bucket: Bucket) -> None:
        """Write the means of this worker's columns into the flats of the other workers of its machine."""
        chunks = [host * self._columns + column for column in self._served for host in range(len(self._hosts))]
        for place, flat in enumerate(self._shared.flats[bucket.index][0]):
            if place != self._place:
                for chunk in map(bucket.chunk, chunks):
                    flat[chunk].copy_(bucket.flats[0][chunk])
        self._shared.announce_means(bucket)

    def _server(self, host: int, column: int) -> int:
        """Return the rank that serves a column of a machine."""
        return self._hosts[host][column % len(self._hosts[host])]

    def _chunk(self, bucket: Bucket, host: int, column: int) -> torch.Tensor:
        """Return a machine's chunk of a column, in this worker's first flat."""
        return bucket.flats[0][bucket.chunk(host * self._columns + column)]

    def _received(self, bucket: Bucket, host: int, column: int, index: int) -> torch.Tensor:
        """Return the buffer for a sum of another machine."""
        return bucket.inbox[(index * len(self._hosts) + host) * self._columns + column]
