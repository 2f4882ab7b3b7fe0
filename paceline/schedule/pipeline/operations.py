"""Pipeline schedules as lists of operations.

A model is cut into stages. A schedule lists each worker's operations in order, with their stages and microbatches. It
is plain data made by pure functions. The executor performs it, the clock simulates it, and the drawing shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple


class Kind(StrEnum):
    """Kind of an operation, with its letter in drawings."""

    FORWARD = "F"
    BACKWARD = "B"  # the whole backward pass: gradients for the input and the weights
    INPUT = "I"  # first half of a split backward pass: the gradient for the input, for which another stage waits
    WEIGHT = "W"  # second half of a split backward pass: the gradients for the weights
    SEND = "s"
    RECEIVE = "r"
    REDUCE = "+"  # reduce the gradients over the workers of a stage
    UPDATE = "U"


class Operation(NamedTuple):
    """An operation of a stage."""

    kind: Kind
    stage: int  # stage, numbered from 0 at the input of the model
    # number of the microbatch. -1 for ``REDUCE`` and ``UPDATE``, which cover all since the last update.
    microbatch: int = -1
    # version of the weights: the number of updates of this stage since the start of the schedule. Backward passes,
    # whole or split, name the version of their forward pass. ``UPDATE`` names the version that it makes.
    version: int = 0
    # stage at the other end of a ``SEND`` or ``RECEIVE``, ``stage - 1`` or ``stage + 1``. Outputs go to the next stage,
    # their gradients to the previous stage. -1 for the other kinds.
    peer: int = -1


@dataclass(frozen=True)
class Schedule:
    """The operations of each worker, in order."""

    name: str
    stages: int
    microbatches: int  # number of microbatches that go through the pipeline
    # operations of each worker. Stages of the same worker do not send values to each other.
    workers: tuple[tuple[Operation, ...], ...]

    def stages_of(self, worker: int) -> tuple[int, ...]:
        return tuple(sorted({operation.stage for operation in self.workers[worker]}))

    def workers_of(self, stage: int) -> tuple[int, ...]:
        """Return the workers of a stage. A replicated stage has several workers."""
        return tuple(worker for worker in range(len(self.workers)) if stage in self.stages_of(worker))

    def worker_of(self, stage: int, microbatch: int) -> int:
        """Return the worker that computes a stage for a microbatch. Raises KeyError if no worker computes it."""
        return self._places[stage, microbatch]

    @cached_property
    def _places(self) -> dict[tuple[int, int], int]:
        return {
            (operation.stage, operation.microbatch): worker
            for worker, operations in enumerate(self.workers)
            for operation in operations
            if operation.kind is Kind.FORWARD
        }
