"""Choice of the workers that make the same updates as an owner of slices, and of those that receive its weights.

::

    shard_copy, one machine     [0 1 2]         0: 1             1: 2             2: 0
    shard_copy, two machines    [0 1] [2 3]     0: 2             1: 3             2: 0             3: 1
    shard_within="machine"      [0 1] [2] [3]   0: 2, 3          1: 2, 3          2: 0, 3          3: 1, 2

A copy receives the mean gradients of an owner and makes the same update, with the same bits, so the state of a lost
owner is complete. One worker of each other machine needs the new weights of an owner, and a copy there has them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from paceline.environments import env
from paceline.settings import Settings


class Owners(NamedTuple):
    """Workers that own slices: those with the first shares of the state."""

    number: int  # number of owners
    copied: bool | None = None  # whether another worker makes the same updates. None if only in an elastic run.
    within: bool = False  # whether a worker of each other machine makes them

    @classmethod
    def of(cls, settings: Settings, workers: int) -> Owners:
        """Return the owners of strategy ``sharded``: all workers."""
        return cls(workers, settings.shard_copy, settings.shard_within == "machine")


def copies_of(owners: Owners, hosts: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Return the ranks that make the same updates as each rank would as an owner.

    Args:
        hosts: ranks of the workers on each machine.

    >>> copies_of(Owners(4, copied=True), [[0, 1], [2, 3]])
    {0: [2], 1: [3], 2: [0], 3: [1]}
    >>> copies_of(Owners(5, within=True), [[0, 1], [2, 3], [4]])[4]
    [0, 2]
    """
    launched = env.launch_info()
    elastic = launched is not None and launched.elastic
    copied, size = elastic if owners.copied is None else owners.copied, sum(map(len, hosts))
    copies: dict[int, list[int]] = {}
    for rank in range(size):
        every = _elsewhere(rank, hosts) if owners.within else []
        copies[rank] = sorted(every or ([copy_of(rank, hosts)] if copied and size > 1 else []))
    return copies


def copy_of(rank: int, hosts: Sequence[Sequence[int]]) -> int:
    """Return the rank that keeps a copy of a rank's share: on the next machine, or the next one if there is one.

    >>> [copy_of(rank, [[0, 1], [2]]) for rank in range(3)], copy_of(1, [[0, 1]])
    ([2, 2, 0], 0)
    """
    return next(iter(_elsewhere(rank, hosts)), (rank + 1) % sum(map(len, hosts)))


def _elsewhere(rank: int, hosts: Sequence[Sequence[int]]) -> list[int]:
    """Return a rank on each other machine, beginning with the next one."""
    machine = next(place for place, ranks in enumerate(hosts) if rank in ranks)
    return writers(rank, [*hosts[machine + 1 :], *hosts[:machine]])


def seats_of(kept: Sequence[tuple[int, int] | None]) -> list[int]:
    """Return the rank that gets each share. Workers keep their shares, and others get those that are left.

    Args:
        kept: number of the share that each rank has, and the number of all shares. None if it has none.

    >>> seats_of([(0, 4), (2, 4), (3, 4), None]), seats_of([(1, 3), (2, 3), (1, 3)]), seats_of([(0, 4), (2, 4)])
    ([0, 3, 1, 2], [2, 0, 1], [0, 1])
    """
    ranks = range(len(kept))[::-1]  # a worker that was dropped and returns has a later rank than its successor
    seats = {one[0]: rank for rank in ranks if (one := kept[rank]) is not None and one[1] == len(kept)}
    others = iter([rank for rank in range(len(kept)) if rank not in seats.values()])
    return [seats[number] if number in seats else next(others) for number in range(len(kept))]


def heirs_of(
    holders: Sequence[Collection[int]], sizes: Sequence[int], leaving: Collection[int], workers: int
) -> dict[int, int]:
    """Return the ranks that inherit the slices which only leaving workers hold, by index of the slice.

    Args:
        holders: ranks that hold each slice.
        sizes: number of elements of each slice.

    >>> heirs_of([[0, 1], [1], [2], [1, 2]], [64, 64, 64, 64], [1, 2], 4)
    {1: 0, 2: 3, 3: 0}
    """
    loads = {rank: 0 for rank in range(workers) if rank not in leaving}
    heirs = {}
    for index, held in enumerate(holders):
        if not loads.keys() & held:
            heirs[index] = min(loads, key=lambda rank: loads[rank])
            loads[heirs[index]] += sizes[index]
    return heirs


def receivers_of(
    copies: Mapping[int, Sequence[int]], hosts: Sequence[Sequence[int]], shared: bool
) -> dict[int, list[int]]:
    """Return the ranks that receive the new weights of each rank.

    Args:
        copies: see :func:`copies_of`.
        hosts: ranks of the workers on each machine.
        shared: whether the workers of a machine share their weights, so that one of them receives new weights for all.

    >>> receivers_of({0: [2], 1: [3], 2: [4], 3: [4], 4: [0]}, [[0, 1], [2, 3], [4]], shared=True)
    {0: [4], 1: [4], 2: [0], 3: [1], 4: [2]}
    """
    everyone = [rank for ranks in hosts for rank in ranks]
    found = {rank: writers(rank, [one for one in hosts if rank not in one]) if shared else everyone for rank in copies}
    return {rank: sorted({*ranks}.difference(copies[rank], [rank])) for rank, ranks in found.items()}


def writers(owner: int, hosts: Sequence[Sequence[int]]) -> list[int]:
    """Return which rank of each machine writes the slices of an owner."""
    return [writer_of(owner, ranks) for ranks in hosts]


def writer_of(owner: int, ranks: Sequence[int]) -> int:
    """Return which of a machine's ranks writes the slices of an owner."""
    return owner if owner in ranks else ranks[owner % len(ranks)]
