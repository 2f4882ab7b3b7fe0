"""Process sets: groups of workers that run operations among themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.horovod.engine.negotiation import ADD_SET, REMOVE_SET
from paceline.horovod.engine.operations import Task
from paceline.horovod.engine.requests import GLOBAL, Request

if TYPE_CHECKING:
    from paceline.horovod.engine.engine import Engine


class ProcessSet:
    """Group of workers. Pass it to ``init`` or ``add_process_set`` first, then to operations.

    Args:
        ranks: ranks of the members.

    Attributes:
        process_set_id: ID of the process set. None before it is added and after it is removed.
        ranks: ranks of the members, in ascending order.

    Raises:
        ValueError: ``ranks`` does not consist of integers.
    """

    process_set_id: int | None = None

    def __init__(self, ranks: Iterable[int]) -> None:
        found: list[Any] = list(ranks) if isinstance(ranks, Iterable) else [None]
        if not all(isinstance(one, int) for one in found):
            raise ValueError(f"ProcessSet({ranks!r}): give a list of ranks.")
        self.ranks: list[int] = sorted(found)
        self._engine: Engine | None = None

    def _enter(self, engine: Engine | None, number: int | None) -> None:
        self._engine, self.process_set_id = engine, number

    def size(self) -> int | None:
        """Return the number of members, or None if the process set is not added."""
        return None if self._engine is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this worker's index among the members, -1 if it is not a member, None if the set is not added."""
        if self._engine is None:
            return None
        return self.ranks.index(self._engine.rank) if self.included() else -1

    def included(self) -> bool | None:
        """Return whether this worker is a member, or None if the process set is not added."""
        return None if self._engine is None else self._engine.rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
"""Process set of all workers."""
_added: list[ProcessSet] = []


def fill_in(engine: Engine, wanted: Sequence[ProcessSet]) -> None:
    """Set up the global process set and add the process sets passed to ``init``."""
    global_process_set.ranks = list(range(engine.size))
    global_process_set._enter(engine, GLOBAL)
    for one in wanted:
        add(engine, one)


def forget() -> None:
    """Detach all process sets from an engine that has been shut down."""
    for one in (global_process_set, *_added):
        one._enter(None, None)
    global_process_set.ranks = []
    _added.clear()


def add(engine: Engine, given: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set and return it, as ``add_process_set`` does."""
    one = given if isinstance(given, ProcessSet) else ProcessSet(given)
    if not one.ranks or len(set(one.ranks)) < len(one.ranks) or not 0 <= one.ranks[0] <= one.ranks[-1] < engine.size:
        raise ValueError(f"{one}: give ranks from 0 to {engine.size - 1}, each at most once.")
    request = Request(GLOBAL, ADD_SET, ADD_SET, splits=tuple(one.ranks), detail=str(one.ranks))
    handle = engine.submit(request, Task([], []))
    handle.wait()
    if handle.value < 0:
        raise ValueError(f"{one}: there already is a process set of these ranks.")
    one._enter(engine, handle.value)
    _added.append(one)
    return one


def remove(engine: Engine, one: ProcessSet) -> bool:
    """Remove a process set, as ``remove_process_set`` does."""
    if one.process_set_id in (None, GLOBAL):
        return False
    assert one.process_set_id is not None
    number = one.process_set_id
    engine.submit(Request(GLOBAL, REMOVE_SET, REMOVE_SET, root=number, detail=str(number)), Task([], [])).wait()
    one._enter(None, None)
    _added.remove(one)
    return True
