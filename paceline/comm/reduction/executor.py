"""Means over all workers, in one canonical order, while the backward pass computes the next tensors.

A reduction is three things::

    plan        buckets (``reduction.buckets``), and who holds which nodes of the canonical tree (``schedule.tree``)
    exchange    who sends what to whom, so that the parts of a bucket come together (``reduction.exchange``)
    executor    this file: which bucket is in which phase, the transfers, and the sums

Each worker adds up its chunks of a bucket along the tree, so the bits do not depend on who computed what. A bucket
leaves as soon as its tensors are written. Before a worker waits for others, it sends what it has of the next bucket::

    bucket 0    scatter ─────── reduce ──────────────────────── means
    bucket 1            scatter ─────────────── reduce ──────────────── means
    bucket 2                            scatter ─────── reduce ──────────────── means
                └─────────── backward pass ────────────┘└───────── finish ──────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter

import torch

from paceline.comm.collectives.subgroup import Subgroup
from paceline.comm.reduction.buckets import Bucket, pack
from paceline.comm.reduction.division import Divisor, divide
from paceline.comm.reduction.exchange import Exchange, Messages, Phase
from paceline.comm.transport.base import Message
from paceline.comm.transport.transfer import Transfer
from paceline.comm.world import World
from paceline.events import EventLog
from paceline.schedule.tree import Node, total
from paceline.system import fault_points


class Reduction:
    """Averages tensors over all workers; used again for each step.

    Args:
        world: all workers, or a subgroup.
        exchange: moves the bytes between them.
        tensors: examples of what will be summed (shapes, types, strides), in the order in which they become ready.
        events: where to record each bucket.
        name: what is being summed, for the records.
        bucket_bytes: bytes from which on a bucket is full. Defaults to those of the exchange's layout.

    Attributes:
        kind: of the exchange, for the records.
        members: number of tensors.
    """

    def __init__(
        self,
        world: World | Subgroup,
        exchange: Exchange,
        tensors: list[torch.Tensor],
        events: EventLog,
        name: str,
        bucket_bytes: int | None = None,
    ) -> None:
        self._world, self._exchange = world, exchange
        self._events, self._name = events, name
        self.kind, self.members = exchange.kind, len(tensors)
        self._bucket_bytes = bucket_bytes or exchange.layout.bucket_bytes
        self._buckets = pack(tensors, exchange.layout, self._bucket_bytes)
        exchange.open(self._buckets)
        self._at = {member: (bucket, at) for bucket in self._buckets for at, member in enumerate(bucket.members)}
        self._sums = len(exchange.before)
        self._phases: tuple[Phase | None, ...] = (*exchange.before, None, *exchange.after)
        """None: :meth:`_reduce`. Nothing here may refer to itself: memory is freed when the last user has gone."""

    def describe(self) -> dict[str, str | int]:
        """Return kind, number and size of the buckets, for the records."""
        return {"kind": self.kind, "buckets": len(self._buckets), "bucket_bytes": self._bucket_bytes}

    def begin(self, nodes: list[list[Node]], divisor: Divisor, check: Callable[[], None] | None = None) -> None:
        """Start a step.

        Args:
            nodes: for each rank, the nodes whose sums it holds, from left to right.
            divisor: what the sums are divided by; called when the first bucket has left.
            check: raises if workers are at different steps, so that their parts would never come. Called before any
                wait.
        """
        self._own = len(nodes[self._world.rank])
        self._divisor, self._check = divisor, check
        self._done = [0] * len(self._phases)
        """Number of buckets that have begun each phase."""
        self._exchange.begin(nodes)
        for bucket in self._buckets:
            bucket.waiting, bucket.sent = len(bucket.members), 0

    def slots(self, member: int) -> list[torch.Tensor]:
        """Return where to write the sums of a tensor: for each node of this worker a view of the tensor's shape."""
        bucket, at = self._at[member]
        return [views[at] for views in bucket.views[: self._own]]

    def written(self, member: int) -> None:
        """Mark the slots of a tensor as filled.

        A bucket leaves when all its tensors are written and all buckets before it have left.

        Raises:
            WorkerLost: a worker was lost after this generation formed.
        """
        self._world.check()
        bucket, _ = self._at[member]
        bucket.waiting -= 1
        while self._done[0] < len(self._buckets) and self._buckets[self._done[0]].waiting == 0:
            self._buckets[self._done[0]].started = perf_counter()
            self._advance(0)
            self._advance_others()

    def finish(self, arrived: Callable[[list[torch.Tensor]], None] | None = None) -> None:
        """Wait until the means are in :meth:`mean`.

        Args:
            arrived: gets the means of each bucket, while later buckets are on their way.

        Raises:
            WorkerLost: another worker went away, or stayed silent for the timeout.
        """
        while self._done[-2] < len(self._buckets):
            self._advance_others()
        while self._done[-1] < len(self._buckets):
            self._advance(len(self._phases) - 1)
            bucket = self._buckets[self._done[-1] - 1]
            seconds = perf_counter() - bucket.started
            self._events.mark("exchange", what=self._name, bucket=bucket.index, bytes=bucket.sent, seconds=seconds)
            if arrived is not None:
                arrived(bucket.views[0])

    def mean(self, member: int) -> torch.Tensor:
        """Return the mean of a tensor over all workers, after :meth:`finish`. The next step overwrites it."""
        bucket, at = self._at[member]
        return bucket.views[0][at]

    def _advance_others(self) -> None:
        """Take one bucket through each phase between the first and the last, but none that has just ended a phase.

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
            if phase > self._sums:
                _wait(bucket.receives)
                _wait(bucket.sends)
            for sends, receives in (self._phases[phase] or self._reduce)(bucket) or ():
                self._start(bucket, sends, receives)

    def _reduce(self, bucket: Bucket) -> Iterable[Messages] | None:
        """Add up this worker's chunks along the tree, divide, and give the means to others."""
        if self._name == "gradients" and bucket is self._buckets[-1]:
            fault_points.reach("inside the collective")
        if self._check is not None:
            self._check()
        divisor = self._divisor()
        _wait(bucket.receives)
        for mean, parts in self._exchange.collect(bucket):
            divide(total(parts, torch.Tensor.add_), divisor, out=mean)
        return self._exchange.deliver(bucket)

    def _start(self, bucket: Bucket, sends: list[Message], receives: list[Message]) -> None:
        """Start to send and receive what is not empty. A chunk is, if it has a small share of a small bucket."""
        sends, receives = ([one for one in many if one.tensor.numel()] for many in (sends, receives))
        transfers = self._world.start_transfers(sends, receives)
        bucket.receives += transfers[: len(receives)]
        bucket.sends += transfers[len(receives) :]
        bucket.sent += sum(one.tensor.nbytes for one in sends)


def _wait(transfers: list[Transfer]) -> None:
    """Wait for transfers, and forget them."""
    for transfer in transfers:
        transfer.wait()
    transfers.clear()
