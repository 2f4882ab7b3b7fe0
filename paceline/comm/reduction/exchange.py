"""Seam between a reduction and the wire: how the parts of a bucket come together, and the means back.

:class:`~paceline.comm.reduction.executor.Reduction` sends, waits and adds up. An exchange says what, between whom, and
knows nothing of the executor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeAlias

import torch

from paceline.comm.reduction.buckets import Bucket, Layout
from paceline.comm.transport.base import Message
from paceline.schedule.tree import Node, first_of

TAGS = 1 << 12
"""Tags for each bucket: one for each node a worker can hold, the last for the means."""

Messages: TypeAlias = tuple[list[Message], list[Message]]
"""Sends and receives to start together."""
Phase: TypeAlias = Callable[[Bucket], Iterable[Messages] | None]
"""What is done to a bucket. The executor starts its messages one after the other, if there are any."""
Parts: TypeAlias = list[tuple[Node, torch.Tensor]]
"""Sums of nodes of the canonical tree for one chunk, from left to right. Adding them up overwrites them."""


class Exchange(Protocol):
    """Brings the parts of a bucket together, and the means back.

    A bucket passes the phases ``before``, the sums (:meth:`collect`, :meth:`deliver`), and the phases ``after``. Before
    the sums the executor waits for the bucket's receives, and before each phase after them for all its transfers. So
    each phase begins with a wait for what peers do in the phase before, which they have had time to do.

    Attributes:
        kind: name for the records.
        layout: rules for packing tensors into buckets.
        before: phases before this worker adds up its chunks.
        after: phases after that. Following the last phase the means are in ``bucket.flats[0]``.
    """

    kind: str
    layout: Layout

    @property
    def before(self) -> tuple[Phase, ...]: ...

    @property
    def after(self) -> tuple[Phase, ...]: ...

    def open(self, buckets: list[Bucket]) -> None:
        """Take the buckets, once. All workers call this in one order."""
        ...

    def begin(self, nodes: list[list[Node]]) -> None:
        """Start a step, for which each rank holds the sums of these nodes: make room in the buckets."""
        ...

    def collect(self, bucket: Bucket) -> Iterator[tuple[torch.Tensor, Parts]]:
        """Yield, for each chunk that this worker adds up, where its mean belongs and its parts."""
        ...

    def deliver(self, bucket: Bucket) -> Iterable[Messages] | None:
        """Give the means of this worker's chunks to all who need them."""
        ...


def nothing(_: Bucket) -> None:
    """Do nothing in a phase, before which the executor has waited for all transfers."""


def in_order(nodes: list[list[Node]], ranks: Iterable[int]) -> list[tuple[Node, int, int]]:
    """Return the nodes that these ranks hold from left to right, each with its rank and its index there.

    >>> in_order([[Node(0, 2)], [Node(1, 0)]], [0, 1])
    [(Node(level=1, place=0), 1, 0), (Node(level=0, place=2), 0, 0)]
    """
    held = [(node, rank, index) for rank in ranks for index, node in enumerate(nodes[rank])]
    return sorted(held, key=lambda one: first_of(one[0]))
