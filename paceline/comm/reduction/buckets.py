"""Buckets of contiguously packed tensors, so that few large messages carry them.

Packing is a pure function of the tensors and a :class:`Layout`, and the same on all workers::

    tensors    0 1 2 | 3 4 | 5 6 ...     in the order in which they become ready
    bucket 1       [ 3 | 4 ]             each tensor starts at a cache line
    chunks     [ q=0  | q=1 | q=2 ]      one for each worker that adds them up, cut at cache lines
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch

from paceline.comm.shm.tensors import CACHE_LINE, aligned
from paceline.comm.waiting import Transfer
from paceline.schedule.link_shares import WINDOW_BUCKETS, windows

_LINE = CACHE_LINE // 4  # number of float32 elements in a cache line


class Layout(NamedTuple):
    """Rules for packing tensors into buckets."""

    bucket_bytes: int  # number of bytes at which a bucket is full, unless the settings give another number
    shares: Sequence[float] = (1.0,)  # fraction of a bucket in each of its chunks. The fractions add up to 1.
    first_bytes: int | None = None  # number of bytes at which the first bucket is full, if less than ``bucket_bytes``
    # rank of the server of each tensor. Each bucket is then a single chunk for a single server.
    homes: Sequence[int] | None = None
    # whether later buckets overwrite the sums of earlier ones, whose means the servers keep elsewhere
    windowed: bool = False
    # whether a worker waits for a bucket only when all have been sent, or when another bucket needs its memory
    eager: bool = False


@dataclass
class Bucket:
    """Tensors of one type, packed contiguously.

    Attributes:
        index: ordinal of the bucket. Buckets are sent in this order.
        members: indices of its tensors.
        examples: example tensors that define the shapes, types and strides.
        cuts: first element of each chunk, followed by the end of the last chunk.
        home: rank of the server that adds up the whole bucket. None if each rank adds up a chunk.
        start: offset of its flats in the memory for a node, in bytes.
        after: index of the last bucket of the step that uses the same memory before this one. -1 if there is none.
        flats: one 1-D tensor of ``cuts[-1]`` elements for each tree node that a worker may hold.
        views: for each flat, the members as views into the flat.
        means: flat of the means. By default they replace the sums in the first flat.
        mean_views: the members as views into ``means``.
        inbox: receive buffers for the parts of the peers.
        receives, sends: transfers to wait for.
        sent: number of bytes that this worker has sent to others in this step.
        waiting: number of members that are not yet written.
        started: ``perf_counter()`` at the start of the bucket's first phase.
    """

    index: int
    members: list[int]
    examples: list[torch.Tensor]
    cuts: list[int]
    home: int | None = None
    start: int = 0
    after: int = -1
    flats: list[torch.Tensor] = field(default_factory=list)
    views: list[list[torch.Tensor]] = field(default_factory=list)
    means: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    mean_views: list[torch.Tensor] = field(default_factory=list)
    inbox: list[torch.Tensor] = field(default_factory=list)
    receives: list[Transfer] = field(default_factory=list)
    sends: list[Transfer] = field(default_factory=list)
    sent: int = 0
    waiting: int = 0
    started: float = 0.0

    def chunk(self, index: int) -> slice:
        return slice(*self.cuts[index : index + 2])

    @property
    def nbytes(self) -> int:
        return self.cuts[-1] * self.examples[0].element_size()

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.cuts[-1], dtype=self.examples[0].dtype, device=self.examples[0].device)

    def add_flat(self, flat: torch.Tensor | None = None) -> None:
        """Add a flat for the sums of one more node. Defaults to zeros on the device of the tensors."""
        self.flats.append(self.zeros() if flat is None else flat)
        self.views.append(self._views_of(self.flats[-1]))
        if not self.mean_views:
            self.put_means(self.flats[0])

    def put_means(self, flat: torch.Tensor) -> None:
        self.means, self.mean_views = flat, self._views_of(flat)

    def _views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        starts = accumulate(map(_room, self.examples), initial=0)
        return [view_like(flat, start, one) for start, one in zip(starts, self.examples, strict=False)]


def pack(tensors: list[torch.Tensor], layout: Layout, bucket_bytes: int) -> list[Bucket]:
    homes, buckets = layout.homes, []
    runs = split(tensors, bucket_bytes, layout.first_bytes, neighbors=layout.windowed)
    if homes:
        runs = [[one for one in run if homes[one] == home] for run in runs for home in sorted({homes[i] for i in run})]
    for index, members in enumerate(runs):
        examples = [tensors[member] for member in members]
        home = homes[members[0]] if homes else None
        elements = sum(map(_room, examples))
        chunks = len(layout.shares)
        cuts = cut(elements, layout.shares) if home is None else [0] * (home + 1) + [elements] * (chunks - home)
        buckets.append(Bucket(index, members, examples, cuts, home))
    sizes = [aligned(bucket.nbytes) for bucket in buckets]
    most = max(WINDOW_BUCKETS * bucket_bytes, 2 * max(sizes, default=0)) if layout.windowed else sum(sizes)
    for bucket, place in zip(buckets, windows(sizes, most), strict=True):
        bucket.start, bucket.after = place
    return buckets


def split(tensors: list[torch.Tensor], most: int, first: int | None = None, neighbors: bool = True) -> list[list[int]]:
    """Return the tensor indices of each bucket: tensors of one type and device, of about ``most`` bytes.

    Args:
        tensors: tensors in the order in which they become ready.
        first: number of bytes at which the first bucket is full, if that is less.
        neighbors: whether a tensor of another type ends a bucket. Otherwise it may lie between tensors of a bucket, as
            a bias does between weights that are sent in fewer bytes.
    """
    buckets: list[list[int]] = []
    started: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = defaultdict(int)
    for member, tensor in enumerate(tensors):
        kind = tensor.dtype, tensor.device
        if neighbors and started and kind not in started:
            buckets += started.values()
            started.clear()
            sizes.clear()
        started.setdefault(kind, []).append(member)
        sizes[kind] += tensor.nbytes
        if sizes[kind] >= (most if buckets or first is None else min(first, most)):
            buckets.append(started.pop(kind))
            del sizes[kind]
    return buckets + sorted(started.values(), key=lambda members: members[-1])


def cut(elements: int, shares: Sequence[float]) -> list[int]:
    """Return the boundaries of the chunks with these shares of ``elements``, rounded to whole cache lines.

    >>> cut(1600, [0.5, 0.25, 0.25])
    [0, 800, 1200, 1600]
    """
    ends = [round(elements * end / _LINE) * _LINE for end in accumulate(shares)]
    return [0, *(min(end, elements) for end in ends[:-1]), elements]


def _room(tensor: torch.Tensor) -> int:
    """Return the number of elements up to the next tensor, which starts at a cache line as an allocated tensor does.

    At other addresses, matrix products of an optimizer may round differently (MKL does on some processors).
    """
    return aligned(max(tensor.nbytes, 1)) // tensor.element_size()


def view_like(flat: torch.Tensor, start: int, example: torch.Tensor) -> torch.Tensor:
    """Return a view into a flat with the shape of the example, and with its strides if the example has no gaps."""
    part = flat[start : start + example.numel()]
    dense = torch.empty_like(example, device="meta").stride()
    return part.as_strided(example.shape, dense, part.storage_offset())
