"""Placement of microbatches or shards on workers that do not all have the samples. Integers only, no clock.

::

    microbatch   0    1    2    3           worker 0   0 1 ─ 0 1 ─ 0   3     3 has no other holder,
    held by      0   0 1  0 1   0           worker 1         2     1 2       so 1 moves on to worker 1

A step takes as long as the worker that finishes last. The earliest possible end is found by augmenting
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


class Move(NamedTuple):
    """Microbatch whose samples a worker that holds them reads for a worker that computes it."""

    microbatch: int
    reader: int
    worker: int


@lru_cache(maxsize=64)
def place(
    holders: tuple[tuple[int, ...], ...], workers: int, speeds: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], ...]:
    """Return the microbatches of each worker, so that the last worker finishes as early as possible.

    Args:
        holders: ranks of the workers that can compute each microbatch.
        workers: number of workers.
        speeds: relative speeds of the workers. Defaults to equal ones.

    >>> place(((0,), (0, 1), (0, 1), (0,)), 2)
    ((0, 3), (1, 2))
    >>> place(((0, 1),) * 4, 2, (3, 1))
    ((0, 1, 2), (3,))
    """
    speeds = speeds or (1,) * workers
    room = [0] * workers
    while sum(room) < len(holders):
        _add_room(room, speeds)
    even = tuple(room)
    owned: list[list[int]] = [[] for _ in range(workers)]
    for microbatch in range(len(holders)):
        while not _give(microbatch, holders, owned, even, room, set()):
            _add_room(room, speeds)
    return tuple(tuple(sorted(own)) for own in owned)


def _add_room(room: list[int], speeds: Sequence[int]) -> None:
    """Add a microbatch to the room of each worker that would finish it first."""
    ends = [(count + 1) / speed for count, speed in zip(room, speeds, strict=True)]
    for rank, end in enumerate(ends):
        room[rank] += end == min(ends)


def _give(
    microbatch: int,
    holders: Sequence[Sequence[int]],
    owned: list[list[int]],
    even: Sequence[int],
    room: Sequence[int],
    tried: set[int],
) -> bool:
    """Give a microbatch to a holder that has room for it, perhaps after another microbatch has moved on from it.

    If possible it goes to the worker of the microbatch before it, because adjacent sums are sent as one.
    """
    ranks = [rank for rank in holders[microbatch] if rank not in tried]
    tried.update(ranks)
    if free := [rank for rank in ranks if len(owned[rank]) < room[rank]]:
        chosen = min(
            free, key=lambda rank: (max(len(owned[rank]) + 1 - even[rank], 0), microbatch - 1 not in owned[rank], rank)
        )
        owned[chosen].append(microbatch)
        return True
    for rank in ranks:
        for other in owned[rank]:
            if _give(other, holders, owned, even, room, tried):
                owned[rank].remove(other)
                owned[rank].append(microbatch)
                return True
    return False


def pools(holders: tuple[tuple[int, ...], ...], workers: int, speeds: tuple[int, ...] = ()) -> list[Pool]:
    """Return the shares of :func:`place` by the holders of their microbatches, those with few holders first.

    >>> pools(((0,), (0, 1), (0, 1), (0,)), 2)
    [Pool(owner=0, microbatches=[0, 3], holders=(0,)), Pool(owner=1, microbatches=[1, 2], holders=(0, 1))]
    """
    found: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for owner, own in enumerate(place(holders, workers, speeds)):
        for microbatch in own:
            found.setdefault((owner, holders[microbatch]), []).append(microbatch)
    return sorted((Pool(owner, own, ranks) for (owner, ranks), own in found.items()), key=lambda one: len(one.holders))


@lru_cache(maxsize=64)
def moves(holders: tuple[tuple[int, ...], ...], workers: int) -> tuple[Move, ...]:
    """Return the microbatches to send so that no worker computes more than an even share of them, and only those.

    >>> moves(((0,), (0,), (0,), (1,)), 2)
    (Move(microbatch=2, reader=0, worker=1),)
    """
    owned = [[*own] for own in place(holders, workers)]
    even, found = -(-len(holders) // workers), list[Move]()
    while len(most := max(owned, key=len)) > even:
        least = min(owned, key=len)
        microbatch = most.pop()
        least.append(microbatch)
        reader, worker = owned.index(most), owned.index(least)
        if worker not in holders[microbatch]:
            found.append(Move(microbatch, reader, worker))
    while True:  # until place() needs all of them
        placed = place(after(found, holders), workers)
        used = [one for one in found if one.microbatch in placed[one.worker]]
        if used == found:
            return tuple(used)
        found = used


def after(sent: Sequence[Move], holders: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the workers that can compute each microbatch once those of ``sent`` have arrived."""
    more = {one.microbatch: (one.worker,) for one in sent}
    return tuple(ranks + more.get(microbatch, ()) for microbatch, ranks in enumerate(holders))


def spread(sizes: Sequence[int], holders: Sequence[Sequence[int]], workers: int) -> list[list[int]]:
    """Return the items of each worker, so that all workers have about as much to do.

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
