"""Interface between a reduction and the network: collecting the parts of a bucket and distributing the means.

:class:`~paceline.comm.reduction.executor.Reduction` sends, waits and adds up. An exchange decides which messages go
between which workers, and does not depend on the executor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from paceline.comm.reduction.buckets import Bucket, Layout
from paceline.comm.reduction.narrow import NARROW, wide
from paceline.comm.transport.base import Message
from paceline.schedule.tree import Node, first_of

TAGS = 1 << 12  # number of tags per bucket: one for each node that a worker can hold, and the last ones for the means

Messages: TypeAlias = tuple[list[Message], list[Message]]  # sends and receives to start together
Phase: TypeAlias = Callable[[Bucket], Iterable[Messages] | None]
"""Function that processes a bucket. The executor starts the messages that it yields, if any, in their order."""
Parts: TypeAlias = list[tuple[Node, torch.Tensor]]
"""Sums of canonical-tree nodes for one chunk, from left to right. Adding them up overwrites them."""


class Exchange(Protocol):
    """Interface for collecting the parts of a bucket and distributing the means.

    A bucket passes the phases ``before``, the sums (:meth:`collect`, :meth:`deliver`) and the phases ``after``. The
    executor waits for the bucket's receives before the sums, and for all its transfers before each phase after them. So
    each phase begins with a wait for the previous phase of the peers, which they have had time to finish.

    Attributes:
        kind: name for the event records.
        layout: rules for packing tensors into buckets.
        before: phases before this worker adds up its chunks.
        after: phases after the sums. When the last phase has ended, the means are in ``bucket.means``.
    """

    kind: str
    layout: Layout

    @property
    def before(self) -> tuple[Phase, ...]: ...

    @property
    def after(self) -> tuple[Phase, ...]: ...

    def open(self, buckets: list[Bucket]) -> None:
        """Set the buckets, once. All workers must call this method in the same order."""
        ...

    def begin(self, nodes: list[list[Node]]) -> None:
        """Start a step in which each rank holds the sums of ``nodes[rank]``, and make room for these in the buckets."""
        ...

    def collect(self, bucket: Bucket) -> Iterator[tuple[torch.Tensor, Parts]]:
        """Yield the destination of the mean, and the parts, for each chunk that this worker adds up."""
        ...

    def deliver(self, bucket: Bucket) -> Iterable[Messages] | None:
        """Distribute the means of this worker's chunks to all workers that need them."""
        ...


@runtime_checkable
class OwnerExchange(Exchange, Protocol):
    """Exchange whose buckets have servers, which keep the means and later spread other values of the same shapes."""

    def expect(self, bucket: Bucket) -> list[Message]:
        """Return the receives of the parts of a bucket."""
        ...

    def spread(self, bucket: Bucket) -> Iterable[Messages] | None:
        """Send a bucket from its server to all other workers, after the means of all buckets have been reduced."""
        ...

    def spreads_here(self, bucket: Bucket) -> bool:
        """Return whether another worker spreads a bucket to this one."""
        ...

    def await_spread(self, bucket: Bucket) -> None:
        """Wait until a bucket is in ``bucket.means``, if the transport has no message for it."""
        ...


def nothing(_: Bucket) -> None:
    """Do nothing in a phase that exists only because the executor waits for all transfers before it."""


def widened(parts: Parts) -> Parts:
    """Return sums in 16 and 8 bits as copies in float32, so that adding them up rounds only the result."""
    return [(node, wide(value) if value.dtype in NARROW else value) for node, value in parts]


def in_order(nodes: list[list[Node]], ranks: Iterable[int]) -> list[tuple[Node, int, int]]:
    """Return the nodes of these ranks from left to right, each with its rank and its index among the rank's nodes.

    >>> in_order([[Node(0, 2)], [Node(1, 0)]], [0, 1])
    [(Node(level=1, place=0), 1, 0), (Node(level=0, place=2), 0, 0)]
    """
    held = [(node, rank, index) for rank in ranks for index, node in enumerate(nodes[rank])]
    return sorted(held, key=lambda one: first_of(one[0]))
