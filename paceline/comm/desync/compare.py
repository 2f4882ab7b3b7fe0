"""Comparison of the workers' recorded calls, with a sentence about the first difference. No communication.

A record is one call of a worker, as plain data::

    number   position in the sequence of calls of its group, from 1
    group    name of the group; empty for the group of all workers
    ranks    members of the group; None for all workers
    call     what must be equal on all members: "all_reduce of float32 [10]"
    note     for a call of the session that synchronizes all workers: "step 11"; otherwise empty
    sites    lines of the script that led to the call, innermost first: ["metrics.py:8", "train.py:41"]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

from paceline.errors import name_ranks

SYMMETRIC = frozenset((
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor",
))  # fmt: skip
"""Operations in which all members have the same role. Two of them swapped on one worker mix up values."""

_NAMED = 8
_CURE = (
    "Make all workers call the same operations with the same shapes and types in the same order; look for a call that "
    "only some ranks make."
)
_ORDER = "Make all workers make these calls in the same order; look for a loop over a set, or for code by rank."


class Record(TypedDict):
    """A recorded call of a worker."""

    number: int
    group: str
    ranks: list[int] | None
    call: str
    note: str
    sites: list[str]


def compare(records_of: dict[int, list[Record]]) -> str | None:
    """Return a sentence about the first call that differs between workers, or None if no recorded calls differ.

    A call that a worker has not made yet is not a difference, because the worker may only be late.

    Args:
        records_of: latest calls of each reachable rank, oldest first. Their number may differ between ranks.
    """
    for group in sorted({record["group"] for records in records_of.values() for record in records}):
        found = _in_group(records_of, group)
        for number in sorted({number for records in found.values() for number in records}):
            here = {rank: records[number] for rank, records in found.items() if number in records}
            if len({record["call"] for record in here.values()}) > 1:
                since, place = _since(found, number)
                return f"The workers called different operations {since}: call {place} was {_parted(here)}. {_CURE}"
    return None


def swapped(records_of: dict[int, list[Record]]) -> str | None:
    """Return a sentence about the first equal calls whose lines the workers passed in different orders, or None.

    Only the calls in the group of all workers between the last two calls of the session are compared.
    """
    found = _in_group(records_of, "")
    windows = {rank: _window(records) for rank, records in found.items()}
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, window in windows.items():
        alike.setdefault(tuple(sorted(map(_through, window))), []).append(rank)
    for ranks in alike.values():
        for column in zip(*(windows[rank] for rank in ranks), strict=True):
            here = dict(zip(ranks, column, strict=True))
            if len({_through(record) for record in column}) > 1:
                since, place = _since(found, column[0]["number"])
                return (
                    f"The workers called {column[0]['call']} in different orders {since}, so that values are mixed "
                    f"up: call {place} was the one at {_grouped(here)}. {_ORDER}"
                )
    return None


def _in_group(records_of: dict[int, list[Record]], group: str) -> dict[int, dict[int, Record]]:
    return {
        rank: {record["number"]: record for record in records if record["group"] == group}
        for rank, records in records_of.items()
    }


def _window(records: dict[int, Record]) -> list[Record]:
    """Return the symmetric calls between the last two calls of the session, which could be swapped."""
    met = [number for number, record in records.items() if record["note"]]
    begin, end = (met[-2] if len(met) > 1 else 0), (met[-1] if met else 0)
    window = [record for number, record in sorted(records.items()) if begin < number < end]
    return [record for record in window if record["call"].split(" ")[0] in SYMMETRIC]


def _since(found: dict[int, dict[int, Record]], number: int) -> tuple[str, int]:
    """Return the last synchronization before a call as text, and the position of the call after it."""
    met = [record for records in found.values() for record in records.values() if record["note"]]
    before = max((record for record in met if record["number"] < number), key=lambda one: one["number"], default=None)
    if before is None:
        return "since the start", number
    return f"since {before['note']}", number - before["number"]


def _parted(here: dict[int, Record]) -> str:
    """Return "A on ranks 0, 2 (train.py:41) but B on rank 1 (train.py:44)", after the members of a smaller group."""
    members = next(iter(here.values()))["ranks"]
    group = f"in the group of {_named(members)}, " if members is not None else ""
    depth = _depth(here, lambda record: record["call"])
    parts = []
    for call in dict.fromkeys(record["call"] for record in here.values()):
        ranks = [rank for rank, record in here.items() if record["call"] == call]
        sites = " and ".join(dict.fromkeys(_through(here[rank], depth) for rank in ranks))
        parts.append(f"{call} on {_named(ranks)} ({sites})" if sites else f"{call} on {_named(ranks)}")
    return group + " but ".join(parts)


def _grouped(here: dict[int, Record]) -> str:
    """Return text such as "train.py:41 on rank 0 but at train.py:42 on rank 1"."""
    depth = _depth(here, _through)
    groups: dict[str, list[int]] = {}
    for rank, record in here.items():
        groups.setdefault(_through(record, depth), []).append(rank)
    return " but at ".join(f"{site} on {_named(ranks)}" for site, ranks in groups.items())


def _depth(here: dict[int, Record], key: Callable[[Record], str]) -> int:
    """Return the smallest number of lines that distinguishes records with different keys, or 1 if none does."""
    for depth in range(1, max(len(record["sites"]) for record in here.values()) + 1):
        of_key = {(key(record), _through(record, depth)) for record in here.values()}
        if len({site for _, site in of_key}) == len(of_key) > 1:
            return depth
    return 1


def _through(record: Record, depth: int | None = None) -> str:
    """Return the lines that led to a call. Several lines, because a shared function may be called from many places."""
    return ", called at ".join(record["sites"][:depth])


def _named(ranks: list[int]) -> str:
    return name_ranks(ranks, most=_NAMED)
