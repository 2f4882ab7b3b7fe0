"""Sums over all workers by the back end's own all-reduce: in its order, at its speed.

What DistributedDataParallel does (Li et al. 2020, arXiv 2006.15704)::

    backward    layer 3   layer 2   layer 1   layer 0
    bucket of layers 3 and 2          └ all_reduce ───────┐
    bucket of layers 1 and 0                              │   └ all_reduce ─┐
    finish                                                └─────────────────┴─ divide

The order of additions is the back end's, and depends on the number of workers: for ``exact`` only if whole numbers are
added (``step.fixed_point``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.comm.reduction.bucketed import (
    LARGEST_BUCKET,
    SMALLEST_BUCKET,
    Bucket,
    BucketedReduction,
    Divisor,
    split,
)
from paceline.comm.reduction.division import divide
from paceline.comm.world import World
from paceline.events import EventLog
from paceline.schedule.tree import Node

FIRST_BUCKET = 2**20


class CollectiveReduction(BucketedReduction):
    """Averages tensors over all workers, each of which has one running sum, or none.

    Args:
        world, tensors, events, name, bucket_bytes: see :class:`BucketedReduction`.
    """

    kind = "collective"

    def __init__(
        self,
        world: World,
        tensors: list[torch.Tensor],
        events: EventLog,
        name: str,
        bucket_bytes: int | None = None,
    ) -> None:
        self._workers = world
        super().__init__(world, tensors, events, name, bucket_bytes=bucket_bytes)
        self._phases = (self._start, self._finish)

    def _full(self) -> int:
        """On GPUs as in DistributedDataParallel, as each operation has a cost of its own; gloo has a smaller one."""
        return SMALLEST_BUCKET if self._workers.transport.capabilities.blocking_wait else LARGEST_BUCKET

    def _split(self) -> list[list[int]]:
        """A small bucket before the others: the wire is idle until the first one leaves."""
        first = split(self._tensors, min(FIRST_BUCKET, self._bucket_bytes))[0]
        rest = split(self._tensors[len(first) :], self._bucket_bytes)
        return [first, *([len(first) + member for member in members] for members in rest)]

    @property
    def _chunks(self) -> int:
        return 1

    def begin(self, nodes: list[list[Node]], divisor: Divisor, check: Callable[[], None] | None = None) -> None:
        assert all(len(held) <= 1 for held in nodes), "only running sums can be added in any order"
        super().begin(nodes, divisor, check)
        if not nodes[self._world.rank]:
            for bucket in self._buckets:
                bucket.flats[0].zero_()

    def _add_flats(self, count: int) -> None:
        for bucket in self._buckets:
            if not bucket.flats:
                example = self._example(bucket)
                self._add_flat(bucket, torch.zeros(bucket.cuts[-1], dtype=example.dtype, device=example.device))

    def _start(self, bucket: Bucket) -> None:
        bucket.sends = [self._workers.start_all_reduce(bucket.flats[0])]

    def _finish(self, bucket: Bucket) -> None:
        divisor = self._agree(bucket)
        bucket.sends.pop().wait()
        divide(bucket.flats[0], divisor, out=bucket.flats[0])

    def _bytes_sent(self, bucket: Bucket) -> int:
        """What a ring sends, the least possible."""
        size = self._world.size
        return 2 * (size - 1) * bucket.flats[0].nbytes // size
