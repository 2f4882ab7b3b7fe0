"""Sums over all workers by the back end's own all-reduce, with its speed and its order of additions.

DistributedDataParallel works in the same way (Li et al. 2020, arXiv 2006.15704)::

    backward    layer 3   layer 2   layer 1   layer 0
    bucket of layers 3 and 2          └ all_reduce ───────┐
    bucket of layers 1 and 0                              │   └ all_reduce ─┐
    finish                                                └─────────────────┴─ divide

The order of additions depends on the back end and on the number of workers. So ``exact`` can use this exchange only to
add whole numbers (``step.gradients.fixed_point``).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from paceline.comm.reduction.buckets import Bucket, Layout
from paceline.comm.reduction.exchange import Parts, Phase, nothing
from paceline.comm.world import World
from paceline.schedule.link_shares import LARGEST_BUCKET, SMALLEST_BUCKET
from paceline.schedule.tree import Node

FIRST_BUCKET = 2**20
"""Size of the first bucket in bytes. It is small because the wire is idle until the first bucket is sent."""

_ALL = Node(0, 0)  # placeholder for the node of a sum over all workers, to which nothing is added


class CollectiveExchange:
    """Exchange by the back end's all-reduce. Each worker holds one running sum or none.

    There is no phase after the sums, because the all-reduce leaves its result in each worker's bucket.
    """

    kind = "collective"

    def __init__(self, world: World) -> None:
        self._world = world
        # On GPUs as in DistributedDataParallel, because each operation has a fixed cost. That of gloo is smaller.
        size = SMALLEST_BUCKET if world.transport.capabilities.blocking_wait else LARGEST_BUCKET
        self.layout = Layout(size, first_bytes=FIRST_BUCKET)
        self.deliver = nothing

    @property
    def before(self) -> tuple[Phase, ...]:
        return (self._start,)

    @property
    def after(self) -> tuple[Phase, ...]:
        return ()

    def open(self, buckets: list[Bucket]) -> None:
        self._buckets = buckets

    def begin(self, nodes: list[list[Node]]) -> None:
        assert all(len(held) <= 1 for held in nodes), "only running sums can be added in any order"
        for bucket in self._buckets:
            if not bucket.flats:
                bucket.add_flat()
            elif not nodes[self._world.rank]:
                bucket.flats[0].zero_()

    def _start(self, bucket: Bucket) -> None:
        bucket.receives.append(self._world.start_all_reduce(bucket.flats[0]))
        size = self._world.size
        bucket.sent = 2 * (size - 1) * bucket.flats[0].nbytes // size  # bytes of a ring, the minimum

    def collect(self, bucket: Bucket) -> Iterator[tuple[torch.Tensor, Parts]]:
        """Yield the bucket, whose only part is the sum over all workers."""
        yield bucket.flats[0], [(_ALL, bucket.flats[0])]
