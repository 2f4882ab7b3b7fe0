"""Dry run of a schedule, without computation. Sends do not block, receives and reductions do.

The simulated clock uses it, and the proof of the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from paceline.errors import InputError
from paceline.schedule.pipeline.operations import Kind, Operation, Schedule

T = TypeVar("T")


def describe(worker: int, index: int, operation: Operation) -> str:
    """Return a description of an operation and its position.

    >>> describe(2, 7, Operation(Kind.RECEIVE, 1, 3, peer=0))
    'worker 2, operation 7 (receive of stage 1 from stage 0 for microbatch 3)'
    """
    name = operation.kind.name.lower()
    other = f" {'to' if operation.kind == Kind.SEND else 'from'} stage {operation.peer}" if operation.peer >= 0 else ""
    about = f" for microbatch {operation.microbatch}" if operation.microbatch >= 0 else ""
    return f"worker {worker}, operation {index} ({name} of stage {operation.stage}{other}{about})"


def dry_run(schedule: Schedule, perform: Callable[[int, int, Operation], bool]) -> None:
    """Advance all workers until each has finished.

    Args:
        perform: performs an operation, given the worker, the index in its list, and the operation. Returns whether it
            was performed. If not, it is tried again after other workers have advanced.
    """
    position = [0] * len(schedule.workers)
    advanced = True
    while advanced:
        advanced = False
        for worker, operations in enumerate(schedule.workers):
            while position[worker] < len(operations) and perform(
                worker, position[worker], operations[position[worker]]
            ):
                position[worker] += 1
                advanced = True
    stuck = [(worker, index) for worker, index in enumerate(position) if index < len(schedule.workers[worker])]
    if stuck:
        waits = "; ".join(describe(worker, index, schedule.workers[worker][index]) for worker, index in stuck)
        raise InputError(
            f"schedule {schedule.name}: a deadlock, no worker can advance. Waiting: {waits}. Change their order"
        )


@dataclass
class Reductions(Generic[T]):
    """Reductions of replicated stages, each of which waits until all workers of the stage have arrived."""

    holders: dict[int, int]  # number of workers of each stage
    _done: dict[tuple[int, int], int] = field(default_factory=dict)
    _arrived: dict[tuple[int, int], dict[int, T]] = field(default_factory=dict)

    def arrive(self, stage: int, worker: int, value: T) -> list[T] | None:
        """Record that a worker has arrived at a reduction with a value.

        Returns:
            the values of all workers, or None until all workers have arrived.
        """
        turn = self._done.get((stage, worker), 0)
        values = self._arrived.setdefault((stage, turn), {})
        values.setdefault(worker, value)
        if len(values) < self.holders[stage]:
            return None
        self._done[stage, worker] = turn + 1
        return list(values.values())
