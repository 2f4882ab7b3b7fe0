"""A schedule carried out without computing anything: sends do not block; receives do, and reductions.

The proof and the simulated clock go through a schedule this way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from paceline.errors import InputError
from paceline.schedule.operations import Kind, Operation, Schedule

T = TypeVar("T")


def describe(worker: int, index: int, operation: Operation) -> str:
    """Where an operation stands and what it is, in words.

    >>> describe(2, 7, Operation(Kind.RECEIVE, 1, 3, peer=0))
    'worker 2, operation 7 (receive of stage 1 from stage 0 for microbatch 3)'
    """
    name = operation.kind.name.lower()
    other = f" {'to' if operation.kind == Kind.SEND else 'from'} stage {operation.peer}" if operation.peer >= 0 else ""
    about = f" for microbatch {operation.microbatch}" if operation.microbatch >= 0 else ""
    return f"worker {worker}, operation {index} ({name} of stage {operation.stage}{other}{about})"


def dry_run(schedule: Schedule, perform: Callable[[int, int, Operation], bool]) -> None:
    """Let all workers go on until each of them is done.

    Args:
        schedule: whose.
        perform: does an operation of a worker, the so many-th; returns whether it could be done now. If not, it is
            tried again when others have gone on.

    Raises:
        InputError: nobody can go on.
    """
    at = [0] * len(schedule.workers)
    moved = True
    while moved:
        moved = False
        for worker, operations in enumerate(schedule.workers):
            while at[worker] < len(operations) and perform(worker, at[worker], operations[at[worker]]):
                at[worker] += 1
                moved = True
    stuck = [(worker, index) for worker, index in enumerate(at) if index < len(schedule.workers[worker])]
    if stuck:
        waits = "; ".join(describe(worker, index, schedule.workers[worker][index]) for worker, index in stuck)
        raise InputError(
            f"schedule {schedule.name}: a deadlock, nobody can go on. Waiting: {waits}. Change their order"
        )


@dataclass
class Reductions(Generic[T]):
    """Reductions of the stages: all holders of a stage come, each as often as the others.

    Attributes:
        holders: how many hold each stage.
    """

    holders: dict[int, int]
    _done: dict[tuple[int, int], int] = field(default_factory=dict)
    _met: dict[tuple[int, int], dict[int, T]] = field(default_factory=dict)

    def come(self, stage: int, worker: int, value: T) -> list[T] | None:
        """A worker is there, with a value, or waits there.

        Returns:
            the values of all when all are there, and none before.
        """
        turn = self._done.get((stage, worker), 0)
        values = self._met.setdefault((stage, turn), {})
        values.setdefault(worker, value)
        if len(values) < self.holders[stage]:
            return None
        self._done[stage, worker] = turn + 1
        return list(values.values())
