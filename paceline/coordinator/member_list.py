"""The members of a generation as they are sent: as changes to those of the generation before.

::

    before        a a a a b b b b
    rank 2 lost   [0, 1], [3, 7]
    one joins     [0, 6], {machine c: 1 worker}

So a view change costs each member what has changed, not the whole list; who does not know the generation before gets
changes to an empty one. All that get the same get the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from paceline.coordinator.types import Member, Message, Worker

_Machine = tuple[str, str, bool]
Runs = list[Any]
"""A pair of whole numbers: the first and the last rank of members of the generation before; or a machine's new ones."""


class MemberList:
    """The members that were sent last."""

    def __init__(self) -> None:
        self._members: tuple[Member, ...] = ()

    def changes(self, workers: Sequence[Worker], generation: int) -> list[tuple[list[int], Message]]:
        """Advance to a generation; returns who is to be sent what: the changes, or the whole list.

        Args:
            workers: the members, by rank.
            generation: of them.
        """
        before, self._members = self._members, _members_of(workers)
        follows = [generation > 0 and one.knows == generation - 1 for one in workers]
        about = {"generation": generation, "fresh": all(one.progress is None for one in workers)}
        found: list[tuple[list[int], Message]] = []
        for follow, known in ((True, before), (False, ())):
            told = [one.number for one, follows_it in zip(workers, follows, strict=True) if follows_it is follow]
            if told:
                found.append((told, about | {"members": written(known, self._members)}))
        for one in workers:
            one.knows = generation
        return found


def _members_of(workers: Sequence[Worker]) -> tuple[Member, ...]:
    """The members of a generation, by rank.

    What leads to the shared memory of a worker is left out where not all are on one machine: it would be of use to the
    few workers of the same machine alone, which tell each other when they have come together.
    """
    abouts = [worker.about for worker in workers]
    one_machine = len({(about.get("host"), about.get("address")) for about in abouts}) == 1
    return tuple(
        Member(
            worker.number,
            about.get("host", ""),
            about.get("pid", 0),
            about.get("address", ""),
            tuple(about["arena"]) if one_machine and about.get("arena") else None,
        )
        for worker, about in zip(workers, abouts, strict=True)
    )


def written(before: Sequence[Member], after: Sequence[Member]) -> Runs:
    """Write the members of a generation as changes to those of the one before."""
    ranks = {member: rank for rank, member in enumerate(before)}
    runs: Runs = []
    for key, group in groupby(enumerate(after), lambda one: _run_of(one, ranks)):
        members = [member for _, member in group]
        if isinstance(key, int):
            runs.append([ranks[members[0]], ranks[members[-1]]])
            continue
        host, address, shares = key
        new = {"host": host, "address": address, "workers": [member.worker for member in members]}
        arenas = {"arenas": [member.arena for member in members]} if shares else {}
        runs.append({**new, "pids": [member.pid for member in members], **arenas})
    return runs


def _run_of(one: tuple[int, Member], ranks: dict[Member, int]) -> int | _Machine:
    """What neighbours of the same run have in common: by how much the rank has changed, or the machine."""
    rank, member = one
    known = ranks.get(member)
    return rank - known if known is not None else (member.host, member.address, member.arena is not None)


def read(before: Sequence[Member], runs: Runs) -> tuple[Member, ...]:
    """Read what :func:`written` has written.

    Raises:
        ValueError: it is not about these members.
    """
    members: list[Member] = []
    for run in runs:
        if isinstance(run, list):
            first, last = run
            if not 0 <= first <= last < len(before):
                raise ValueError(f"ranks {first} to {last} of {len(before)}")
            members += before[first : last + 1]
            continue
        arenas = run.get("arenas") or [None] * len(run["workers"])
        for worker, pid, arena in zip(run["workers"], run["pids"], arenas, strict=True):
            members.append(Member(worker, run["host"], pid, run["address"], tuple(arena) if arena else None))
    return tuple(members)
