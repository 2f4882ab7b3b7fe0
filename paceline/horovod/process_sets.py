"""Groups of workers that carry out operations among themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.horovod.engine.negotiation import ADD_SET, REMOVE_SET
from paceline.horovod.engine.operations import Task
from paceline.horovod.engine.requests import GLOBAL, Request

if TYPE_CHECKING:
    from paceline.horovod.engine.engine import Engine


class ProcessSet:
    """Some of the workers; give it to ``init`` or ``add_process_set``, and then to operations.

    Args:
        ranks: of its members.

    Attributes:
        process_set_id: its number; None before it is added, and after it is removed.
        ranks: of its members, in order.

    Raises:
        ValueError: not whole numbers.
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
        """The number of members; None if it is not added."""
        return None if self._engine is None else len(self.ranks)

    def rank(self) -> int | None:
        """The place of this worker among the members; None if it is not added, -1 if it is no member."""
        if self._engine is None:
            return None
        return self.ranks.index(self._engine.rank) if self.included() else -1

    def included(self) -> bool | None:
        """Whether this worker is a member; None if it is not added."""
        return None if self._engine is None else self._engine.rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
"""All workers."""
_added: list[ProcessSet] = []


def fill_in(engine: Engine, wanted: Sequence[ProcessSet]) -> None:
    """Set the global process set up, and add those that ``init`` was given."""
    global_process_set.ranks = list(range(engine.size))
    global_process_set._enter(engine, GLOBAL)
    for one in wanted:
        add(engine, one)


def forget(engine: Engine) -> None:
    """Let go of all process sets."""
    for one in (global_process_set, *_added):
        one._enter(None, None)
    global_process_set.ranks = []
    _added.clear()


def add(engine: Engine, given: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set; all workers call this.

    Raises:
        ValueError: there is one of these ranks, or there are no such ranks.
    """
    one = given if isinstance(given, ProcessSet) else ProcessSet(given)
    if not one.ranks or len(set(one.ranks)) < len(one.ranks) or not 0 <= one.ranks[0] <= one.ranks[-1] < engine.size:
        raise ValueError(f"{one}: there are ranks 0 to {engine.size - 1}, each once.")
    request = Request(GLOBAL, ADD_SET, ADD_SET, splits=tuple(one.ranks), detail=str(one.ranks))
    handle = engine.submit(request, Task([], []))
    handle.wait()
    if handle.value < 0:
        raise ValueError(f"{one}: there is a process set of these ranks.")
    one._enter(engine, handle.value)
    _added.append(one)
    return one


def remove(engine: Engine, one: ProcessSet) -> bool:
    """Remove a process set; all workers call this. False if it is the global one, or not added."""
    if one.process_set_id in (None, GLOBAL):
        return False
    assert one.process_set_id is not None
    number = one.process_set_id
    engine.submit(Request(GLOBAL, REMOVE_SET, REMOVE_SET, root=number, detail=str(number)), Task([], [])).wait()
    one._enter(None, None)
    _added.remove(one)
    return True
