"""What the workers of a pipeline do in a step, as lists of operations.

A model is cut into stages. A schedule lists for each worker, in order, which operation of which stage it performs for
which microbatch. It is plain data made by pure functions: the executor performs it, the clock simulates it, the proof
checks it, the drawing shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple


class Kind(StrEnum):
    """What an operation does; the letter stands for it in drawings."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward pass: gradients for the input and the weights."""
    INPUT = "I"
    """The first part of a split backward pass, which another stage waits for: the gradient for the input."""
    WEIGHT = "W"
    """The second part: the gradients for the weights."""
    SEND = "s"
    RECEIVE = "r"
    REDUCE = "+"
    """Reduce the gradients over the workers of a stage."""
    UPDATE = "U"


class Operation(NamedTuple):
    """One operation of one stage.

    Attributes:
        kind: of the operation.
        stage: from 0, numbered from the input of the model to its output.
        microbatch: its number; -1 for ``REDUCE`` and ``UPDATE``, which cover all since the last one.
        version: of the weights: the number of updates of this stage since the first operation of the schedule. A
            backward pass, whole or split, names the version of its forward pass. ``UPDATE`` names the one it makes.
        peer: of ``SEND`` and ``RECEIVE`` the stage at the other end, ``stage - 1`` or ``stage + 1``. Upwards goes the
            output of a forward pass, downwards the gradient for it. -1 for the other kinds.
    """

    kind: Kind
    stage: int
    microbatch: int = -1
    version: int = 0
    peer: int = -1


@dataclass(frozen=True)
class Schedule:
    """The operations of each worker, in order.

    Attributes:
        name: of the algorithm.
        stages: the number of stages.
        microbatches: the number that goes through the pipeline.
        workers: the operations of each worker. Between stages of one worker nothing is sent.
    """

    name: str
    stages: int
    microbatches: int
    workers: tuple[tuple[Operation, ...], ...]

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """The stages that a worker holds, in order."""
        return tuple(sorted({operation.stage for operation in self.workers[worker]}))

    def workers_of(self, stage: int) -> tuple[int, ...]:
        """The workers of a stage: several, if it is replicated."""
        return tuple(worker for worker in range(len(self.workers)) if stage in self.stages_of(worker))

    def worker_of(self, stage: int, microbatch: int) -> int:
        """The worker that computes a stage for a microbatch.

        Raises:
            KeyError: none does.
        """
        return self._places[stage, microbatch]

    @cached_property
    def _places(self) -> dict[tuple[int, int], int]:
        return {
            (operation.stage, operation.microbatch): worker
            for worker, operations in enumerate(self.workers)
            for operation in operations
            if operation.kind is Kind.FORWARD
        }
