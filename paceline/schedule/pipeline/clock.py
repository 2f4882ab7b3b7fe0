"""Simulated clock: timeline of a schedule, computed from the times of its operations.

::

    computing   a worker performs one operation at a time, in order; B takes as long as I and W together
    transfers   a link carries one value at a time in each direction, in parallel with computing
    waiting     a worker waits in a receive until the value arrives, in a reduce until the other workers arrive
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from paceline.errors import ConfigError, InputError
from paceline.schedule.pipeline.operations import Kind, Operation, Schedule

T = TypeVar("T")


@dataclass(frozen=True)
class Times:
    """Seconds per microbatch, for each stage."""

    forward: tuple[float, ...]  # seconds of a forward pass
    input: tuple[float, ...]  # seconds of the gradient for the input
    weight: tuple[float, ...]  # seconds of the gradients for the weights
    # seconds of a transfer between each stage and the next, in either direction. One fewer than the stages.
    transfer: tuple[float, ...]
    reduce: tuple[float, ...]  # seconds of the reduction of a stage's gradients
    update: tuple[float, ...]  # seconds of an update of a stage

    @classmethod
    def equal(cls, stages: int, forward: float = 1.0, input: float = 1.0, weight: float = 1.0) -> Times:
        """Return equal times for all stages. Transfers, reductions and updates take no time."""
        nothing = (0.0,) * stages
        return cls((forward,) * stages, (input,) * stages, (weight,) * stages, nothing[1:], nothing, nothing)

    def of(self, operation: Operation) -> float:
        """Return the seconds of an operation, or 0 for a receive, which only waits."""
        kind, stage = operation.kind, operation.stage
        if kind == Kind.BACKWARD:
            return self.input[stage] + self.weight[stage]
        if kind == Kind.SEND:
            return self.transfer[min(stage, operation.peer)]
        each = {
            Kind.FORWARD: self.forward,
            Kind.INPUT: self.input,
            Kind.WEIGHT: self.weight,
            Kind.REDUCE: self.reduce,
            Kind.UPDATE: self.update,
        }
        return each[kind][stage] if kind in each else 0.0


class Span(NamedTuple):
    """An operation with its begin and end in seconds since the start of the step.

    A send lasts while the link carries the value, a receive while the worker waits for it. A send overlaps computing.
    """

    operation: Operation
    begin: float
    end: float


TRANSFERS = (Kind.SEND, Kind.RECEIVE)


@dataclass(frozen=True)
class Timeline:
    """Simulated or measured times of the workers' operations."""

    workers: tuple[tuple[Span, ...], ...]  # spans of each worker, in the order of its operations

    @property
    def seconds(self) -> float:
        """Seconds until the last worker has finished."""
        return max((span.end for spans in self.workers for span in spans), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds for which each worker computed, reduced or updated."""
        return tuple(
            sum(span.end - span.begin for span in spans if span.operation.kind not in TRANSFERS)
            for spans in self.workers
        )

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Fraction of the step for which each worker was idle."""
        return tuple(1 - busy / self.seconds if self.seconds else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Mean fraction of the step for which the workers were idle."""
        return sum(self.bubbles) / len(self.workers)


def simulate(schedule: Schedule, times: Times) -> Timeline:
    """Simulate a schedule and return its timeline.

    Raises:
        InputError: the schedule has a deadlock.
    """
    lengths = [len(one) for one in (times.forward, times.input, times.weight, times.reduce, times.update)]
    if {*lengths, len(times.transfer) + 1} != {schedule.stages}:
        raise ConfigError(
            f"times of {lengths} stages and {len(times.transfer)} boundaries do not fit {schedule.stages} stages: give "
            f"one for each stage and one for each of the {schedule.stages - 1} boundaries between them"
        )
    clock = _Clock(schedule, times)
    dry_run(schedule, clock.perform)
    return Timeline(tuple(tuple(spans) for spans in clock.spans))


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
    """Advance all workers until each has finished. Sends do not block, receives and reductions do.

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


class _Clock:
    """Current time of each worker and link."""

    def __init__(self, schedule: Schedule, times: Times) -> None:
        self.spans: list[list[Span]] = [[] for _ in schedule.workers]
        self._times = times
        self._now = [0.0] * len(schedule.workers)
        self._links: dict[tuple[int, int], float] = {}
        self._arrivals: dict[tuple[int, int, int], float] = {}
        self._owner = {
            (one.stage, one.microbatch): worker
            for worker, operations in enumerate(schedule.workers)
            for one in operations
            if one.kind == Kind.FORWARD
        }
        stages = (stage for worker in range(len(schedule.workers)) for stage in schedule.stages_of(worker))
        self._reductions = Reductions[float](Counter(stages))

    def perform(self, worker: int, _: int, operation: Operation) -> bool:
        """Perform an operation and return True, or return False if it waits for an event whose time is unknown."""
        kind, stage, microbatch, _, peer = operation
        begin = ready = self._now[worker]
        if kind == Kind.SEND:
            self._carry(worker, operation)
            return True
        if kind == Kind.RECEIVE:
            if (peer, stage, microbatch) not in self._arrivals:
                return False
            ready = max(begin, self._arrivals.pop((peer, stage, microbatch)))
        elif kind == Kind.REDUCE:
            if (arrived := self._reductions.arrive(stage, worker, begin)) is None:
                return False
            begin = ready = max(arrived)
        self._now[worker] = ready + self._times.of(operation)
        self.spans[worker].append(Span(operation, begin, self._now[worker]))
        return True

    def _carry(self, worker: int, operation: Operation) -> None:
        """Send a value when the link is free."""
        link = (worker, self._owner[operation.peer, operation.microbatch])
        begin = max(self._now[worker], self._links.get(link, 0.0))
        self._links[link] = end = begin + self._times.of(operation)
        self._arrivals[operation.stage, operation.peer, operation.microbatch] = end
        self.spans[worker].append(Span(operation, begin, end))
