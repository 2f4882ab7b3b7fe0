"""Machines of the workers, as the workers themselves describe them."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.environments.start import Identity

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Seat(NamedTuple):
    """Description of a worker's machine by the worker."""

    host: str  # name of the host, which differs between two hosts at the same time
    local_rank: int  # rank of the worker among the workers that its launcher started on the host
    local_size: int  # number of these workers


def seat_of(who: Identity) -> Seat:
    """Return the seat of this process. The boot ID tells hosts with the same name apart, the name containers."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return Seat(f"{platform.node()} {boot}", who.local_rank, who.local_world_size)


def hosts_of(seats: Sequence[Seat]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of the workers of each machine, given the seat of each rank.

    Ranks may be dealt to machines in any order. A local rank that occurs twice on a host belongs to two starts there.
    They count as two machines, because only the workers of a start are sure to share memory.

    >>> hosts_of([Seat("a", 0, 2), Seat("b", 0, 2), Seat("a", 1, 2), Seat("b", 1, 2)])
    ((0, 2), (1, 3))
    >>> hosts_of([Seat("a", 0, 1), Seat("a", 0, 2), Seat("a", 1, 2)])
    ((0,), (1, 2))
    """
    machines: dict[tuple[str, int, int], list[int]] = {}
    seen: dict[Seat, int] = {}
    for rank, seat in enumerate(seats):
        start = seen[seat] = seen.get(seat, -1) + 1
        machines.setdefault((seat.host, seat.local_size, start), []).append(rank)
    return tuple(map(tuple, machines.values()))
