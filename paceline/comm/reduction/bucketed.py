"""Sums over all workers, in one canonical order, at the bytes of a ring.

Every worker holds the sums of some nodes of the canonical tree (``schedule.tree``), for each tensor. Tensors are
packed into buckets. A bucket is cut into a chunk for each worker, and goes around in two rounds::

    reduce-scatter    worker q gets chunk q of every node, adds the nodes up along the tree, divides
    all-gather        worker q sends its chunk, now the mean, to all others

With one node for each worker that is 2(P-1)/P times the bucket's bytes in each direction, the least possible
(Patarasuk and Yuan, 2009), for any number of workers P; each node more adds (P-1)/P. As the owner of a chunk adds
along the tree, the bits do not depend on who computed what.

A bucket starts as soon as its tensors are written, while the backward pass computes the next ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from time import perf_counter

import torch

from paceline import fault_points
from paceline.comm.reduction.division import divide
from paceline.comm.shm.tensors import CACHE_LINE, aligned
from paceline.comm.subgroup import Subgroup
from paceline.comm.transport.base import Message
from paceline.comm.transport.transfer import Transfer
from paceline.comm.world import World
from paceline.events import EventLog
from paceline.schedule.tree import Node, first_of, total

TAGS = 1 << 12
"""Tags for each bucket: one for each node a worker can hold, the last for the all-gather."""

SMALLEST_BUCKET, LARGEST_BUCKET = 5 * 2**20, 25 * 2**20
_MESSAGE_BYTES = 2**19

_LINE = CACHE_LINE // 4
"""Elements of float32 in a cache line."""

Divisor = Callable[[], "torch.Tensor | float"]


@dataclass
class Bucket:
    """Some tensors of one type, packed one after the other, each from a cache line on."""

    index: int
    members: list[int]
    views: list[list[torch.Tensor]]
    flats: list[torch.Tensor]
    cuts: list[int]
    """Where each chunk begins, and the last one ends."""
    inbox: list[torch.Tensor]
    waiting: int = 0
    receives: list[Transfer] = field(default_factory=list)
    sends: list[Transfer] = field(default_factory=list)
    started: float = 0.0


class BucketedReduction:
    """Averages tensors over all workers; used again for each step.

    Args:
        world: the workers, or a subgroup of them.
        tensors: examples of what will be summed (shapes, types, strides), in the order in which they become ready.
        events: where to record each bucket.
        name: what is being summed, for the records.
        tags: the first tag to use.
        bucket_bytes: when a bucket is full; None: as :meth:`_full`.

    Attributes:
        kind: of the reduction, for the records.
    """

    kind = "tree"

    def __init__(
        self,
        world: World | Subgroup,
        tensors: list[torch.Tensor],
        events: EventLog,
        name: str,
        tags: int = 0,
        bucket_bytes: int | None = None,
    ) -> None:
        self._world = world
        self._bucket_bytes = bucket_bytes or self._full()
        self._events = events
        self._name = name
        self._tensors = tensors
        self._tags = tags
        self._buckets = [self._pack(index, members) for index, members in enumerate(self._split())]
        self._bucket_of = {member: bucket for bucket in self._buckets for member in bucket.members}
        self._place_of = {member: place for bucket in self._buckets for place, member in enumerate(bucket.members)}
        self._nodes: list[list[Node]] = []
        self._phases: tuple[Callable[[Bucket], None], ...] = (self._scatter, self._reduce, self._await_means)
        """What becomes of a bucket. Each begins with a wait for what others do in the phase before."""

    def _split(self) -> list[list[int]]:
        """The tensors of each bucket."""
        return split(self._tensors, self._bucket_bytes)

    def _full(self) -> int:
        """The bytes of a full bucket: enough to fill the wire with each of its chunks, little enough to overlap.

        5 MB is the best for gloo in Li et al. 2020 and here; with many workers that would be many small messages.
        """
        return min(max(SMALLEST_BUCKET, self._chunks * _MESSAGE_BYTES), LARGEST_BUCKET)

    def describe(self) -> dict[str, str | int]:
        """What this is, for the records."""
        return {"kind": self.kind, "buckets": len(self._buckets), "bucket_bytes": self._bucket_bytes}

    @property
    def _chunks(self) -> int:
        """Into how many chunks a bucket is cut."""
        return self._world.size

    def _pack(self, index: int, members: list[int]) -> Bucket:
        elements = sum(_room(self._tensors[member]) for member in members)
        return Bucket(index, members, [], [], cut(elements, [1 / self._chunks] * self._chunks), [])

    def cut_by(self, hosts: Sequence[tuple[int, ...]], shares: list[float]) -> None:
        """Let machines add up unequal shares of each bucket; before the first step, and the same at all workers.

        Args:
            hosts: the ranks of the workers of each machine.
            shares: of each machine; their sum is 1.
        """
        for bucket in self._buckets:
            bucket.cuts = cut(bucket.cuts[-1], self._chunk_shares(hosts, shares))

    def _chunk_shares(self, hosts: Sequence[tuple[int, ...]], shares: list[float]) -> list[float]:
        """Of each chunk."""
        of_rank = {rank: share / len(ranks) for ranks, share in zip(hosts, shares, strict=True) for rank in ranks}
        return [of_rank[rank] for rank in range(self._world.size)]

    @property
    def members(self) -> int:
        """How many tensors there are."""
        return len(self._tensors)

    def begin(self, nodes: list[list[Node]], divisor: Divisor, check: Callable[[], None] | None = None) -> None:
        """Start a step.

        Args:
            nodes: for each rank, the nodes whose sums it holds, from left to right.
            divisor: what the sums are divided by; asked for when the first bucket has left.
            check: refuses workers at different steps, whose parts would never come; called before any is waited for.
        """
        self._nodes = nodes
        self._divisor, self._check = divisor, check
        self._done = [0] * len(self._phases)
        self._add_flats(max(map(len, nodes)))
        for bucket in self._buckets:
            bucket.waiting = len(bucket.members)

    def _add_flats(self, count: int) -> None:
        """Make room for so many nodes of each worker in each bucket."""
        for bucket in self._buckets:
            example = self._example(bucket)
            while len(bucket.flats) < count:
                flat = torch.zeros(bucket.cuts[-1], dtype=example.dtype, device=example.device)
                self._add_flat(bucket, flat)
            mine = bucket.flats[0][self._chunk(bucket, self._world.rank)]
            while len(bucket.inbox) < count * self._world.size:
                bucket.inbox.append(torch.empty_like(mine))

    def _example(self, bucket: Bucket) -> torch.Tensor:
        return self._tensors[bucket.members[0]]

    def _add_flat(self, bucket: Bucket, flat: torch.Tensor) -> None:
        bucket.flats.append(flat)
        views, start = [], 0
        for member in bucket.members:
            views.append(_view_like(flat, start, self._tensors[member]))
            start += _room(self._tensors[member])
        bucket.views.append(views)

    def slots(self, member: int) -> list[torch.Tensor]:
        """Where to write the sums of this worker's nodes for a tensor: one place for each node."""
        place = self._place_of[member]
        own = len(self._nodes[self._world.rank])
        return [views[place] for views in self._bucket_of[member].views[:own]]

    def written(self, member: int) -> None:
        """The slots of a tensor are filled; a bucket leaves when all its tensors are, and those before it have left."""
        self._world.check()
        bucket = self._bucket_of[member]
        bucket.waiting -= 1
        while self._done[0] < len(self._buckets) and self._buckets[self._done[0]].waiting == 0:
            self._buckets[self._done[0]].started = perf_counter()
            self._advance(0)
            self._advance_others()

    def _advance_others(self) -> None:
        """Take one bucket through each phase between the first and the last: none that has just ended the one before.

        So a bucket waits for what others have had time to do.
        """
        left = [self._done[0] - 1 if self._done[0] < len(self._buckets) else self._done[0], *self._done[1:]]
        for phase in range(1, len(self._phases) - 1):
            if self._done[phase] < left[phase - 1]:
                self._advance(phase)

    def _advance(self, phase: int) -> None:
        """Take the next bucket through a phase."""
        bucket = self._buckets[self._done[phase]]
        self._done[phase] += 1
        with self._world.awaiting(f"in the all-reduce of bucket {bucket.index} of the {self._name}"):
            self._phases[phase](bucket)

    def finish(self, arrived: Callable[[list[torch.Tensor]], None] | None = None) -> None:
        """Wait until the means are in :meth:`mean`.

        Args:
            arrived: gets the means of each bucket, while later ones are on their way.
        """
        while self._done[-2] < len(self._buckets):
            self._advance_others()
        while self._done[-1] < len(self._buckets):
            self._advance(len(self._phases) - 1)
            bucket = self._buckets[self._done[-1] - 1]
            self._record(bucket)
            if arrived is not None:
                arrived(bucket.views[0])

    def mean(self, member: int) -> torch.Tensor:
        """The mean of a tensor over all workers, after :meth:`finish`; overwritten by the next step."""
        return self._bucket_of[member].views[0][self._place_of[member]]

    def _reduce(self, bucket: Bucket) -> None:
        """Add up this worker's chunk along the tree, divide, and give it to all others."""
        divisor = self._agree(bucket)
        self._await_parts(bucket)
        self._deliver(bucket, self._mean(bucket, divisor))

    def _agree(self, bucket: Bucket) -> torch.Tensor | float:
        """Check that all are at the same step before any part is waited for; what the sums are divided by."""
        if self._name == "gradients" and bucket is self._buckets[-1]:
            fault_points.reach("inside the collective")
        if self._check is not None:
            self._check()
        return self._divisor()

    def _mean(self, bucket: Bucket, divisor: torch.Tensor | float) -> torch.Tensor:
        """The mean of this worker's chunk, added up along the tree."""
        parts = [
            (node, self._part(bucket, rank, place))
            for rank, nodes in enumerate(self._nodes)
            for place, node in enumerate(nodes)
        ]
        parts.sort(key=lambda part: first_of(part[0]))
        mean = bucket.flats[0][self._chunk(bucket, self._world.rank)]
        return divide(total(parts, torch.Tensor.add_), divisor, out=mean)

    def _scatter(self, bucket: Bucket) -> None:
        """Send each worker its chunk of this worker's nodes."""
        world, tag = self._world, self._tag(bucket)
        sends, receives = [], []
        for peer in range(world.size):
            if peer == world.rank:
                continue
            for place in range(len(self._nodes[peer])):
                receives.append(Message(bucket.inbox[place * world.size + peer], peer, tag + place))
            for place in range(len(self._nodes[world.rank])):
                sends.append(Message(bucket.flats[place][self._chunk(bucket, peer)], peer, tag + place))
        self._start_transfers(bucket, sends, receives)

    def _start_transfers(self, bucket: Bucket, sends: list[Message], receives: list[Message]) -> None:
        """Start to send and receive what is not empty."""
        sends, receives = ([one for one in many if one.tensor.numel()] for many in (sends, receives))
        transfers = self._world.start_transfers(sends, receives)
        bucket.receives += transfers[: len(receives)]
        bucket.sends += transfers[len(receives) :]

    def _await_parts(self, bucket: Bucket) -> None:
        for transfer in bucket.receives:
            transfer.wait()
        bucket.receives = []

    def _part(self, bucket: Bucket, rank: int, place: int) -> torch.Tensor:
        """This worker's chunk of a node of some rank; it may be overwritten."""
        if rank == self._world.rank:
            return bucket.flats[place][self._chunk(bucket, rank)]
        return bucket.inbox[place * self._world.size + rank]

    def _deliver(self, bucket: Bucket, mean: torch.Tensor) -> None:
        """Send the mean of this worker's chunk to all others, and get theirs."""
        peers = [peer for peer in range(self._world.size) if peer != self._world.rank]
        tag = self._tag(bucket) + TAGS - 1
        receives = [Message(bucket.flats[0][self._chunk(bucket, peer)], peer, tag) for peer in peers]
        self._start_transfers(bucket, [Message(mean, peer, tag) for peer in peers], receives)

    def _await_means(self, bucket: Bucket) -> None:
        for transfer in (*bucket.receives, *bucket.sends):
            transfer.wait()
        bucket.receives, bucket.sends = [], []

    def _chunk(self, bucket: Bucket, rank: int) -> slice:
        return slice(*bucket.cuts[rank : rank + 2])

    def _tag(self, bucket: Bucket) -> int:
        return self._tags + bucket.index * TAGS

    def _bytes_sent(self, bucket: Bucket) -> int:
        """How much of a bucket this worker gives to others."""
        mine = bucket.flats[0][self._chunk(bucket, self._world.rank)].nbytes
        nodes = len(self._nodes[self._world.rank])
        return nodes * (bucket.flats[0].nbytes - mine) + (self._world.size - 1) * mine

    def _record(self, bucket: Bucket) -> None:
        self._events.mark(
            "exchange",
            what=self._name,
            bucket=bucket.index,
            bytes=self._bytes_sent(bucket),
            seconds=perf_counter() - bucket.started,
        )


def split(tensors: list[torch.Tensor], most: int) -> list[list[int]]:
    """Buckets of neighbours of one type, each of about so many bytes."""
    buckets: list[list[int]] = []
    for _, run in groupby(range(len(tensors)), key=lambda member: (tensors[member].dtype, tensors[member].device)):
        members: list[int] = []
        size = 0
        for member in run:
            members.append(member)
            size += tensors[member].numel() * tensors[member].element_size()
            if size >= most:
                buckets.append(members)
                members, size = [], 0
        if members:
            buckets.append(members)
    return buckets


def cut(elements: int, shares: list[float]) -> list[int]:
    """Where to cut so many elements into chunks of these shares, at whole cache lines; the end is the last cut.

    >>> cut(1600, [0.5, 0.25, 0.25])
    [0, 800, 1200, 1600]
    """
    ends = [round(elements * end / _LINE) * _LINE for end in accumulate(shares)]
    return [0, *(min(end, elements) for end in ends[:-1]), elements]


def _room(tensor: torch.Tensor) -> int:
    """The elements that a tensor takes in a bucket: the next one begins at a cache line, as if allocated by itself.

    Matrix products of an optimizer may round differently at other addresses (MKL does on some processors).
    """
    return aligned(tensor.numel() * tensor.element_size()) // tensor.element_size()


def _view_like(flat: torch.Tensor, start: int, example: torch.Tensor) -> torch.Tensor:
    """A view into the bucket with the shape of the example, and with its strides where it has no holes."""
    part = flat[start : start + example.numel()]
    dense = torch.empty_like(example, device="meta").stride()
    return part.as_strided(example.shape, dense, part.storage_offset())
