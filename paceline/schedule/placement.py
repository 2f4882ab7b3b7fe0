"""Placement of microbatches or shards on workers that do not all have the samples. Integers only, no clock.

::

    microbatch   0    1    2    3           worker 0   0 1 ─ 0 1 ─ 0   3     3 has no other holder,
    held by      0   0 1  0 1   0           worker 1         2     1 2       so 1 moves on to worker 1

A step takes as long as the worker with the most microbatches. The smallest possible maximum is found by augmenting
paths (H. W. Kuhn, "The Hungarian method for the assignment problem", 1955, for workers with several microbatches each):
a microbatch whose holders are full takes the room of another microbatch, which moves on to a holder of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class Pool(NamedTuple):
    """Microbatches of one worker's share that the same workers can compute."""

    owner: int
    microbatches: Sequence[int]
    holders: Sequence[int]  # ranks of the workers that can compute them, the owner included


@lru_cache(maxsize=64)
def place(holders: tuple[tuple[int, ...], ...], workers: int) -> tuple[tuple[int, ...], ...]:
    """Return the microbatches of each worker, with the smallest possible maximum.

    Args:
        holders: ranks of the workers that can compute each microbatch.
        workers: number of workers.

    >>> place(((0,), (0, 1), (0, 1), (0,)), 2)
    ((0, 3), (1, 2))
    """
    even = limit = -(-len(holders) // workers)
    owned: list[list[int]] = [[] for _ in range(workers)]
    for microbatch in range(len(holders)):
        while not _give(microbatch, holders, owned, even, limit, set()):
            limit += 1
    return tuple(tuple(sorted(own)) for own in owned)


def _give(
    microbatch: int, holders: Sequence[Sequence[int]], owned: list[list[int]], even: int, limit: int, tried: set[int]
) -> bool:
    """Give a microbatch to a holder with less than ``limit`` of them, perhaps after another one has moved on from it.

    If possible it goes to the worker of the microbatch before it, because adjacent sums are sent as one.
    """
    ranks = [rank for rank in holders[microbatch] if rank not in tried]
    tried.update(ranks)
    free = [rank for rank in ranks if len(owned[rank]) < limit]
    if free:
        chosen = min(free, key=lambda rank: (max(len(owned[rank]) + 1, even), microbatch - 1 not in owned[rank], rank))
        owned[chosen].append(microbatch)
        return True
    for rank in ranks:
        for other in owned[rank]:
            if _give(other, holders, owned, even, limit, tried):
                owned[rank].remove(other)
                owned[rank].append(microbatch)
                return True
    return False


def pools(holders: tuple[tuple[int, ...], ...], workers: int) -> list[Pool]:
    """Return the shares of :func:`place` by the holders of their microbatches, those with few holders first.

    >>> pools(((0,), (0, 1), (0, 1), (0,)), 2)
    [Pool(owner=0, microbatches=[0, 3], holders=(0,)), Pool(owner=1, microbatches=[1, 2], holders=(0, 1))]
    """
    found: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for owner, own in enumerate(place(holders, workers)):
        for microbatch in own:
            found.setdefault((owner, holders[microbatch]), []).append(microbatch)
    return sorted((Pool(owner, own, ranks) for (owner, ranks), own in found.items()), key=lambda one: len(one.holders))


def spread(sizes: Sequence[int], holders: Sequence[Sequence[int]], workers: int) -> list[list[int]]:
    """Return the items of each worker, such that all workers have about as much to do.

    The largest item that is left goes to the holder that has least to do (R. L. Graham, "Bounds on multiprocessing
    timing anomalies", 1969), after the items that only one worker has.

    >>> spread([9, 5, 4, 4], [(0, 1), (0, 1), (0, 1), (1,)], 2)
    [[0, 2], [1, 3]]
    """
    owned: list[list[int]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for item in sorted(range(len(sizes)), key=lambda one: (len(holders[one]) > 1, -sizes[one])):
        rank = min(holders[item], key=lambda one: loads[one])
        owned[rank].append(item)
        loads[rank] += sizes[item]
    return [sorted(own) for own in owned]
