"""Shares of a reduction for machines whose links differ in speed, and the sizes of buckets.

In a direct reduce-scatter and all-gather of ``n`` bytes over ``P`` machines, a machine that reduces the share ``x``
sends and receives ``n (1 + (P - 2) x)`` bytes: its chunks for the others, and its means. So machine ``i`` with a link
of ``B_i`` bytes per second needs at most the time ``T`` if ``x_i <= (T B_i / n - 1) / (P - 2)``. The smallest ``T``
for which these shares add up to 1 is ``n max(1 / min B, 2 (P - 1) / sum B)``. With one link of eight at half the rate
this is 2 n / B, where equal shares, as in a ring, take 3.5 n / B.

A slow machine sends all its chunks before it receives the last means. Of ``C`` buckets only the last does not overlap,
so the reduction takes ``1 + 1 / C`` times as long, which favors small buckets (:func:`bucket_bytes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

_AS_FAST = 0.75  # links whose rate is at least this fraction of the median count as equal, because measurements vary
_BUCKETS = 16
_LEAST_MESSAGE = 2**16
SMALLEST_BUCKET, LARGEST_BUCKET = 5 * 2**20, 25 * 2**20
SHARED_WINDOWED = SMALLEST_BUCKET // 2
"""Size of a full bucket in a shared window: small, because a window saves memory, and no link carries its buckets."""
_MESSAGE_BYTES = 2**19
WINDOW_BUCKETS = 3
"""Number of full buckets that fit in the memory for the sums of a node, if buckets overwrite earlier ones."""


def of_links(rates: Sequence[float]) -> list[float]:
    """Return the share of each machine. The shares add up to 1.

    >>> of_links([1.0, 1.0, 1.0, 0.9])
    [0.25, 0.25, 0.25, 0.25]
    >>> of_links([1.0, 1.0, 1.0, 0.5])
    [0.3333333333333333, 0.3333333333333333, 0.3333333333333333, 0.0]
    """
    machines = len(rates)
    if machines < 3 or min(rates) >= _AS_FAST * median(rates):
        return [1 / machines] * machines
    seconds = max(1 / min(rates), 2 * (machines - 1) / sum(rates))
    room = [max(seconds * rate - 1, 0.0) for rate in rates]
    return [one / sum(room) for one in room]


def bucket_bytes(nbytes: int, machines: int) -> int:
    """Return the bucket size for unequal shares: a fraction of ``nbytes``, but large enough for efficient messages.

    >>> bucket_bytes(32 * 2**20, machines=8), bucket_bytes(2**20, machines=8)
    (2097152, 524288)
    """
    return max(nbytes // _BUCKETS, machines * _LEAST_MESSAGE)


def full(chunks: int) -> int:
    """Return the size of a full bucket in bytes: large enough for efficient chunks, small enough to overlap.

    5 MB was the best size for gloo in Li et al. 2020 (arXiv 2006.15704) and in our own measurements. With many workers,
    5 MB would be cut into many small messages.
    """
    return min(max(SMALLEST_BUCKET, chunks * _MESSAGE_BYTES), LARGEST_BUCKET)


def window_bytes(workers: int, shared: bool) -> int:
    """Return the memory for the sums of a node, if buckets overwrite earlier ones.

    ``shared``: whether all workers share memory.
    """
    return WINDOW_BUCKETS * (SHARED_WINDOWED if shared else full(workers))


def windows(sizes: Sequence[int], capacity: int) -> list[tuple[int, int]]:
    """Place blocks in memory that is reused cyclically, each behind the previous one.

    Returns:
        for each block, its offset, and the index of the last earlier block that overlaps it, or -1.

    >>> windows([40, 40, 40, 10], 100)
    [(0, -1), (40, -1), (0, 0), (40, 1)]
    """
    placed: list[tuple[int, int]] = []
    for index, size in enumerate(sizes):
        start = placed[-1][0] + sizes[index - 1] if placed else 0
        start = start if start + size <= capacity else 0
        earlier = range(index - 1, -1, -1)
        before = (one for one in earlier if placed[one][0] < start + size and start < placed[one][0] + sizes[one])
        placed.append((start, next(before, -1)))
    return placed
