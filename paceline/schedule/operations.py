"""What the workers of a pipeline do in a step, as lists of operations.

A model is cut into stages. A schedule says for each worker, in order, which operation of which stage it does for which
microbatch. It is plain data made by pure functions: the executor carries it out, the clock prices it, the proof checks
it, the drawing shows it.
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
    """Gradients for the input and for the weights, in one go."""
    INPUT = "I"
    """The half of a backward pass that another stage waits for: the gradient for the input."""
    WEIGHT = "W"
    """The other half: the gradients for the weights."""
    SEND = "s"
    RECEIVE = "r"
    REDUCE = "+"
    """Bring together the gradients of the workers that hold the same stage."""
    UPDATE = "U"


class Operation(NamedTuple):
    """One operation of one stage.

    Attributes:
        kind: what is done.
        stage: whose operation it is, from 0; the model's stages are numbered from its input to its output.
        microbatch: for which microbatch; -1 for ``REDUCE`` and ``UPDATE``, which are about all since the last one.
        version: which weights: how many updates of this stage they contain, counted from the schedule's first
            operation. A backward pass, whole or in halves, names the version that its forward pass used. ``UPDATE``:
            the version that it makes.
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
    """What each worker does, in order.

    Attributes:
        name: of the algorithm.
        stages: into how many parts the model is cut.
        microbatches: how many go through the pipeline.
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
        """The workers that hold a stage: several, if it is replicated."""
        return tuple(worker for worker in range(len(self.workers)) if stage in self.stages_of(worker))

    def worker_of(self, stage: int, microbatch: int) -> int:
        """Who computes a stage for a microbatch.

        Raises:
            KeyError: nobody does.
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
