"""Delta encoding of the members of a generation, relative to the previous generation.

::

    before        a a a a b b b b
    rank 2 lost   [0, 1], [3, 7]
    one joins     [0, 6], {machine c: 1 worker}

The size of a message grows with the number of changes, not of members. Workers that do not know the previous generation
get the changes to an empty one. All workers that get the same changes get the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from paceline.coordinator.types import Member, Message, Worker

_Machine = tuple[str, str, bool]
Runs = list[Any]
"""List of runs: each is the first and last rank of a range of previous members, or the new members of a machine."""


class MemberList:
    """Members of the last generation that was sent."""

    def __init__(self) -> None:
        self._members: tuple[Member, ...] = ()

    def changes(self, workers: Sequence[Worker], generation: int) -> list[tuple[list[int], Message]]:
        """Advance to a generation, and return its messages, each with the numbers of the workers to send it to."""
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
    """Return the members of a generation, by rank.

    Shared-memory handles are omitted unless all workers are on one machine. Otherwise they would be useful only to the
    few workers of the same machine, which exchange them after the rendezvous.
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
    """Encode the members of a generation as changes to the previous members."""
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
    """Return the grouping key of a run: the change in rank of a previous member, or the machine of a new member."""
    rank, member = one
    known = ranks.get(member)
    return rank - known if known is not None else (member.host, member.address, member.arena is not None)


def read(before: Sequence[Member], runs: Runs) -> tuple[Member, ...]:
    """Decode the result of :func:`written`. Raises ValueError if the changes do not apply to these previous members."""
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
