"""Where the workers' lists of calls part: from what each of them did to one sentence.

A record is one call of a worker, as plain data::

    number   its place in the sequence of its group, from 1
    group    the name of the group; empty for the group of all workers
    ranks    the members of the group; none for all workers
    call     what must be the same on all members: "all_reduce of float32 [10]"
    note     of a call of the session where all workers meet: "step 11"; else empty
    sites    the lines of the script that led to the call, the nearest first: ["metrics.py:8", "train.py:41"]

Nothing here talks to anyone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

from paceline.errors import name_ranks

SYMMETRIC = frozenset(
    {
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_gather_single",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
    }
)
"""Operations in which all members do the same: two of them swapped on one worker mix values."""

_NAMED = 8
_CURE = (
    "Make all workers call the same operations with the same shapes and types in the same order; look for a call that "
    "only some ranks make."
)
_ORDER = "Make all workers make these calls in the same order; look for a loop over a set, or for code by rank."


class Record(TypedDict):
    """One call of one worker."""

    number: int
    group: str
    ranks: list[int] | None
    call: str
    note: str
    sites: list[str]


def compare(records_of: dict[int, list[Record]]) -> str | None:
    """The first call that differs between workers, in a sentence; none if nothing that is known differs.

    A worker that has not made a call yet is only late: that is no difference.

    Args:
        records_of: for each rank that is known its last calls, oldest first; how far back they go may differ.
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
    """The first of equal calls that workers made from the same lines but in different orders, in a sentence.

    Looked at are the calls on the group of all workers before the last call of the session.

    Args:
        records_of: as for :func:`compare`.
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
    """The calls that could be swapped, between the last two calls of the session."""
    met = [number for number, record in records.items() if record["note"]]
    begin, end = (met[-2] if len(met) > 1 else 0), (met[-1] if met else 0)
    window = [record for number, record in sorted(records.items()) if begin < number < end]
    return [record for record in window if record["call"].split(" ")[0] in SYMMETRIC]


def _since(found: dict[int, dict[int, Record]], number: int) -> tuple[str, int]:
    """Where the workers met last before a call, and the place of the call since then."""
    met = [record for records in found.values() for record in records.values() if record["note"]]
    before = max((record for record in met if record["number"] < number), key=lambda one: one["number"], default=None)
    if before is None:
        return "since the start", number
    return f"since {before['note']}", number - before["number"]


def _parted(here: dict[int, Record]) -> str:
    """ "A on ranks 0, 2 (train.py:41) but B on rank 1 (train.py:44)"; the members of a smaller group before it."""
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
    """ "train.py:41 on rank 0 but at train.py:42 on rank 1"."""
    depth = _depth(here, _through)
    groups: dict[str, list[int]] = {}
    for rank, record in here.items():
        groups.setdefault(_through(record, depth), []).append(rank)
    return " but at ".join(f"{site} on {_named(ranks)}" for site, ranks in groups.items())


def _depth(here: dict[int, Record], key: Callable[[Record], str]) -> int:
    """How many lines tell records apart whose keys differ; one if no number does."""
    for depth in range(1, max(len(record["sites"]) for record in here.values()) + 1):
        of_key = {(key(record), _through(record, depth)) for record in here.values()}
        if len({site for _, site in of_key}) == len(of_key) > 1:
            return depth
    return 1


def _through(record: Record, depth: int | None = None) -> str:
    """The lines that led there: the same function may be called for different things."""
    return ", called at ".join(record["sites"][:depth])


def _named(ranks: list[int]) -> str:
    return name_ranks(ranks, most=_NAMED)
