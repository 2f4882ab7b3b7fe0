"""Negotiation table of rank 0: which operations all workers have requested. No torch, no socket, no clock.

Workers submit in any order. An operation is executed once all members of its process set have requested it::

    rank 0   b  a  c ─┐
    rank 1   a  c  b ─┴─ ready: a, c, b   executed in this order on all ranks, small operations fused

A repeated request has a number (the response cache), and only that number goes over the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.errors import name_ranks
from paceline.horovod.engine.requests import GLOBAL, Key, Request, conflict

JOIN = "join"
ADD_SET = "add_process_set"
REMOVE_SET = "remove_process_set"
_BYTES = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "int64": 8, "float64": 8}


class Item(NamedTuple):
    """Operation to execute."""

    request: Request  # request as the first worker made it
    number: int = -1  # number of the request in the response cache, or -1
    # by member, the first dimensions of the tensors (``allgather``) or the splits (``alltoall``)
    rows: tuple[tuple[int, ...], ...] = ()
    new: bool = True  # whether the workers do not know the number yet


class Response(NamedTuple):
    """Next action of all workers: one operation, several fused operations, or an error."""

    items: tuple[Item, ...]
    error: str = ""
    joined: tuple[int, ...] = ()

    @property
    def written(self) -> list[Any]:
        """Items as they are sent: only the number if all members know the request."""
        return [
            one.number if one.number >= 0 and not one.new and not one.rows and not self.joined else one
            for one in self.items
        ]


@dataclass
class _Entry:
    since: float
    requests: dict[int, Request] = field(default_factory=dict)
    warned: bool = False


def _first(entry: _Entry) -> Request:
    return next(iter(entry.requests.values()))


class Negotiation:
    """Table of the requests that some ranks have not made yet.

    Args:
        threshold: maximum number of bytes in a fused operation.
        capacity: maximum number of requests in the response cache.
    """

    def __init__(self, size: int, threshold: int, capacity: int) -> None:
        self.sets: dict[int, tuple[int, ...]] = {GLOBAL: tuple(range(size))}  # ranks of each process set, by ID
        self._threshold, self._capacity = threshold, capacity
        self._entries: dict[Key, _Entry] = {}
        self._complete: list[Key] = []
        self._joined: list[int] = []
        self._gone: dict[int, str] = {}
        self._numbers: dict[Key, int] = {}
        self._known: list[dict[int, Request]] = []
        self._announced: set[int] = set()
        self._waits: dict[str, _Entry] = {}
        self._blocked: dict[int, Key] = {}
        self._next_set = 1

    def submit(self, rank: int, request: Request, now: float) -> None:
        self._blocked.pop(rank, None)
        if request.kind == JOIN:
            self._joined.append(rank)
            self._complete += [key for key in self._entries if key[0] == GLOBAL]
            return
        if (number := self._numbers.get(request.key)) is not None:
            if rank not in self._known[number]:
                self._announced.add(number)
            self._known[number][rank] = request
        if (entry := self._entries.get(request.key)) is None:
            entry = self._entries[request.key] = _Entry(now)
        entry.requests[rank] = request
        if len(entry.requests) + len(self._joined) + len(self._gone) >= len(self.sets.get(request.set, ())):
            self._complete.append(request.key)

    def known(self, rank: int, number: int) -> Request:
        """Return the request that this rank has made before under a number of the response cache."""
        return self._known[number][rank]

    def outlive(self, rank: int) -> bool:
        """Return whether a process set without ``rank`` has members that have not left."""
        return any(rank not in ranks and set(ranks) - self._gone.keys() for ranks in self.sets.values())

    def leave(self, rank: int, why: str) -> None:
        self._gone[rank] = why
        self._complete += list(self._entries)

    def take_ready(self) -> list[Response]:
        """Remove and return the operations that can be executed now or have failed."""
        found, fusing = [], _Fusing(self._threshold)
        removed: list[Response] = []
        for key in self._complete:
            entry = self._entries.get(key)
            if entry is None or not self._is_complete(key, entry):
                continue
            del self._entries[key]
            error = self._error(key, entry)
            first = _first(entry)
            if error:
                found.append(Response((Item(first),), error))
                continue
            item = self._item(key, entry, first)
            if not fusing.take(item):
                response = Response((item,), joined=self._joined_of(key))
                (removed if first.kind == REMOVE_SET else found).append(response)
        self._complete.clear()
        joined = self._joined_of((GLOBAL, ""))
        found += [Response(items, joined=joined) for items in fusing.fused()]
        found += removed  # last, because operations before may use these process sets
        if self._joined and len(self._joined) + len(self._gone) >= len(self.sets[GLOBAL]):
            found.append(Response((Item(Request(GLOBAL, JOIN, JOIN, root=self._joined[-1])),)))
            self._joined = []
        return found

    def _joined_of(self, key: Key) -> tuple[int, ...]:
        return tuple(self._joined) if key[0] == GLOBAL else ()

    def _is_complete(self, key: Key, entry: _Entry) -> bool:
        missing = set(self.sets.get(key[0], ())) - entry.requests.keys() - set(self._joined_of(key))
        return not missing or any(rank in self._gone for rank in missing)

    def _error(self, key: Key, entry: _Entry) -> str:
        members = self.sets.get(key[0])
        first = _first(entry)
        if members is None:
            return f"{first.words}: there is no process set {key[0]}; it was removed, or never added."
        if outside := sorted(entry.requests.keys() - set(members)):
            return f"{first.words}: {name_ranks(outside)} called it, but the process set has ranks {list(members)}."
        if gone := [rank for rank in members if rank in self._gone and rank not in entry.requests]:
            return f"{first.words}: {'; '.join(f'rank {rank} {self._gone[rank]}' for rank in gone)}."
        if text := conflict(entry.requests):
            return text
        absent = sorted(set(members) - entry.requests.keys())
        if absent and (first.kind != "allreduce" or first.op not in ("Average", "Sum")):
            return (
                f"{first.words}: {name_ranks(absent)} has called join; until all ranks have, there can be only "
                f"allreduce with Average or Sum."
            )
        return ""

    def _item(self, key: Key, entry: _Entry, first: Request) -> Item:
        number = self._numbers.get(key, -1)
        new = number in self._announced
        self._announced.discard(number)
        if number < 0 and len(self._known) < self._capacity and "noname" not in key[1] and not first.detail:
            number, new = len(self._known), True
            self._numbers[key] = number
            self._known.append(dict(entry.requests))
        rows: tuple[tuple[int, ...], ...] = ()
        members = self.sets[key[0]]
        if first.kind == "allgather":
            rows = tuple(tuple(shape[0] for shape in entry.requests[rank].shapes) for rank in members)
        elif first.kind == "alltoall":
            rows = tuple(entry.requests[rank].splits for rank in members)
        elif first.kind == ADD_SET:
            first = first._replace(root=self._add_set(first.splits))
        elif first.kind == REMOVE_SET:
            self.sets.pop(first.root, None)
            self._complete += [waiting for waiting in self._entries if waiting[0] == first.root]  # they fail
        return Item(first, number, rows, new)

    def _add_set(self, ranks: tuple[int, ...]) -> int:
        if ranks in self.sets.values():
            return -1
        self.sets[self._next_set] = ranks
        self._next_set += 1
        return self._next_set - 1

    def wait_outside(self, rank: int, name: str, set_: int, since: float) -> None:
        """Record that a rank has waited since ``since`` for an operation of a plan, which is not negotiated."""
        entry = self._waits.setdefault(name, _Entry(since))
        entry.requests[rank] = Request(set_, name, "allreduce")

    def end_wait(self, rank: int, name: str) -> None:
        if (entry := self._waits.get(name)) is not None:
            entry.requests.pop(rank, None)
            if not entry.requests:
                del self._waits[name]

    def stalled(self, now: float, seconds: float) -> dict[str, str]:
        """Return, by name, descriptions of operations awaited for more than ``seconds``. Each is returned once."""
        found = {}
        for entry in (*self._entries.values(), *self._waits.values()):
            if now - entry.since > seconds and not entry.warned:
                entry.warned = True
                found[_first(entry).name] = self._stall(entry, now)
        return found

    def block(self, rank: int, key: Key) -> None:
        """Record that the script of a rank is blocked until this operation is done."""
        self._blocked[rank] = key

    def untangle(self) -> list[Response]:
        """Fail deadlocked operations, whose ranks wait for each other in different operations.

        A barrier among them does not fail, because the other ranks can still reach it::

            rank 0   allreduce a   allreduce b   barrier    waits in allreduce b, which fails
            rank 1   allreduce a                 barrier    waits in the barrier
        """
        waiting = {rank: self._entries[key] for rank, key in self._blocked.items() if key in self._entries}
        if not (waiting := {rank: entry for rank, entry in waiting.items() if rank in entry.requests}):
            return []
        awaited = {rank: self._missing(entry) for rank, entry in waiting.items()}
        awaited |= {rank: set(self.sets[GLOBAL]).difference(self._joined) for rank in self._joined}
        while free := [rank for rank, others in awaited.items() if not others <= awaited.keys()]:
            for rank in free:
                del awaited[rank]
        stuck = {_first(entry).key: entry for rank, entry in waiting.items() if rank in awaited}
        failing = [entry for entry in stuck.values() if _first(entry).kind != "barrier"] or list(stuck.values())
        for entry in failing:
            del self._entries[_first(entry).key]
        return [Response((Item(_first(entry)),), self._tangle(entry, waiting)) for entry in failing]

    def _missing(self, entry: _Entry) -> set[int]:
        return set(self.sets.get(_first(entry).set, ())) - entry.requests.keys()

    def _tangle(self, entry: _Entry, waiting: dict[int, _Entry]) -> str:
        where: dict[str, list[int]] = {}
        for rank in sorted(self._missing(entry)):
            where.setdefault(_first(waiting[rank]).words if rank in waiting else JOIN, []).append(rank)
        others = ", ".join(f"{name_ranks(ranks)} in {words}" for words, ranks in where.items())
        return (
            f"{_first(entry).words}: {name_ranks(entry.requests)} waited for {others}, which waited in turn: all must "
            f"call the same operations."
        )

    def give_up(self, now: float, seconds: float) -> list[Response]:
        """Fail operations that some ranks have awaited for more than ``seconds``."""
        late = [key for key, entry in self._entries.items() if now - entry.since > seconds]
        found = []
        for key in late:
            entry = self._entries.pop(key)
            first = _first(entry)
            found.append(Response((Item(first),), f"{self._stall(entry, now)} That is the deadline."))
        return found

    def _stall(self, entry: _Entry, now: float) -> str:
        first = _first(entry)
        missing = sorted(self._missing(entry))
        here = name_ranks(entry.requests)
        return (
            f"{first.words}: {here} waited {now - entry.since:.0f} s for {name_ranks(missing) or 'nobody'}, which "
            f"did not call it."
        )


class _Fusing:
    """Groups of all-reduces that can be executed as one."""

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self._groups: dict[tuple[Any, ...], list[list[Item]]] = {}
        self._sizes: dict[tuple[Any, ...], int] = {}

    def take(self, item: Item) -> bool:
        one = item.request
        if one.kind != "allreduce" or one.op == "Adasum" or len(set(one.dtypes)) != 1:
            return False
        key = (one.set, one.op, one.dtypes[0], one.prescale, one.postscale)
        size = sum(map(math.prod, one.shapes)) * _BYTES.get(one.dtypes[0], 4)
        if key not in self._groups or self._sizes[key] + size > self._threshold:
            self._groups.setdefault(key, []).append([])
            self._sizes[key] = 0
        self._groups[key][-1].append(item)
        self._sizes[key] += size
        return True

    def fused(self) -> Iterator[tuple[Item, ...]]:
        for groups in self._groups.values():
            yield from map(tuple, groups)
