"""Pipelines whose stages have different numbers of workers (PipeDream, Harlap et al. 2018, section 3.1).

A slow stage gets more workers, each with a contiguous share of the microbatches. Stage 0, twice as slow as stage 1, on
two workers; four microbatches::

    0  F0--- F1---    B0---------       B1---------
    1  F2--- F3---             B2---------       B3---------
    2        F0 B0--- F2 B2--- F1 B1--- F3 B3---

Stage 1 takes the microbatches as they come, here 0, 2, 1, 3; within a run of microbatches that has the same worker in
every stage, in order. (In increasing order all replicas but one would wait.) The order is found by simulating the step:
a forward pass of a stage with r workers takes r units, a backward pass 2 r. A free worker does the next pass that is
ready, in 1F1B a backward pass if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.errors import ConfigError
from paceline.schedule.pipeline.operations import Kind, Operation
from paceline.schedule.pipeline.transfers import Order, check_at_least
from paceline.schedule.shares import even


def replica_counts(stages: int, replicas: int | Sequence[int]) -> tuple[int, ...]:
    """The number of workers of each stage.

    Raises:
        ConfigError: no stages, no workers, or replicas of another number of stages.
    """
    check_at_least(1, stages=stages)
    counts = (replicas,) * stages if isinstance(replicas, int) else tuple(replicas)
    if len(counts) != stages:
        raise ConfigError(
            f"replicas {counts} are those of {len(counts)} stages, not of {stages}: give one for each stage"
        )
    check_at_least(1, replicas=min(counts))
    return counts


def runs(counts: Sequence[int], microbatches: int) -> tuple[range, ...]:
    """The longest ranges of microbatches that have the same worker in every stage; each is computed in order.

    Args:
        counts: the number of workers of each stage.
        microbatches: the number that goes through the pipeline.

    >>> runs((2, 3), 6)
    (range(0, 2), range(2, 3), range(3, 4), range(4, 6))
    """
    starts = sorted({share.start for each in counts for share in even(microbatches, each)})
    return tuple(range(start, stop) for start, stop in zip(starts, [*starts[1:], microbatches], strict=True))


def forwards_first(counts: Sequence[int], microbatches: int) -> list[Order]:
    """The order of each worker in GPipe: all its forward passes, then all its backward passes."""
    return _Simulation(counts, microbatches, most=None).orders()


def backwards_first(counts: Sequence[int], microbatches: int) -> list[Order]:
    """The order of each worker in 1F1B, with the fewest microbatches in flight that do not make the step longer.

    A worker has at least as many in flight as there are workers from its stage on, per replica of it.
    """
    least = [-(-sum(counts[stage:]) // counts[stage]) for stage in range(len(counts))]
    units = _Simulation(counts, microbatches, [microbatches] * len(counts)).units
    steps = (_Simulation(counts, microbatches, [each + more for each in least]) for more in range(microbatches + 1))
    return next(step.orders() for step in steps if step.units <= units)


@dataclass
class _Worker:
    """A worker in the simulation.

    Attributes:
        stage: the one it holds.
        runs: its share of the microbatches.
        done: the number of passes it has begun, of each kind and run.
        free: when it has finished its current pass.
        order: the passes it has begun.
    """

    stage: int
    runs: tuple[range, ...]
    done: dict[Kind, list[int]]
    free: int = 0
    order: Order = field(default_factory=list)

    def next(self, kind: Kind) -> list[int]:
        """The next microbatch of each run; the runs that are furthest behind come first."""
        runs = [(done, run) for done, run in zip(self.done[kind], self.runs, strict=True) if done < len(run)]
        return [run[done] for done, run in sorted(runs, key=lambda one: one[0] / len(one[1]))]

    def begun(self, kind: Kind) -> int:
        """The number of passes it has begun."""
        return sum(self.done[kind])

    def begin(self, kind: Kind, microbatch: int, end: int) -> None:
        """Begin the next pass of a run."""
        self.order.append(Operation(kind, self.stage, microbatch))
        self.free = end
        for place, run in enumerate(self.runs):
            self.done[kind][place] += microbatch in run


class _Simulation:
    """A simulation of the step, in units.

    Args:
        counts: the number of workers of each stage.
        microbatches: the number that goes through the pipeline.
        most: how many may be in flight in a worker of each stage; none: all of them, before the first backward pass.
    """

    def __init__(self, counts: Sequence[int], microbatches: int, most: Sequence[int] | None) -> None:
        self._counts, self._most = counts, most
        self._ends: dict[tuple[Kind, int, int], int] = {}
        self._workers = []
        for stage, each in enumerate(counts):
            for share in even(microbatches, each):
                held = tuple(run for run in runs(counts, microbatches) if run.start in share)
                done = {kind: [0] * len(held) for kind in (Kind.FORWARD, Kind.BACKWARD)}
                self._workers.append(_Worker(stage, held, done))
        now = 0
        while len(self._ends) < 2 * len(counts) * microbatches:
            for worker in self._workers:
                if worker.free <= now:
                    self._advance(worker, now)
            now = min(worker.free for worker in self._workers if worker.free > now)
        self.units = max(self._ends.values())

    def orders(self) -> list[Order]:
        """The order of each worker."""
        return [worker.order for worker in self._workers]

    def _advance(self, worker: _Worker, now: int) -> None:
        """Let a free worker begin a pass that is ready."""
        for kind in (Kind.BACKWARD, Kind.FORWARD):
            for microbatch in self._allowed(worker, kind):
                if all(self._ends.get(need, now + 1) <= now for need in self._needs(kind, worker.stage, microbatch)):
                    end = now + self._counts[worker.stage] * (2 if kind == Kind.BACKWARD else 1)
                    self._ends[kind, worker.stage, microbatch] = end
                    worker.begin(kind, microbatch, end)
                    return

    def _allowed(self, worker: _Worker, kind: Kind) -> list[int]:
        in_flight = worker.begun(Kind.FORWARD) - worker.begun(Kind.BACKWARD)
        if self._most is None:
            allowed = kind == Kind.FORWARD or not worker.next(Kind.FORWARD)
        else:
            allowed = kind == Kind.BACKWARD or in_flight < self._most[worker.stage]
        return worker.next(kind) if allowed else []

    def _needs(self, kind: Kind, stage: int, microbatch: int) -> list[tuple[Kind, int, int]]:
        """The passes that must be done first."""
        if kind == Kind.FORWARD:
            return [(kind, stage - 1, microbatch)] if stage else []
        later = [(kind, stage + 1, microbatch)] if stage < len(self._counts) - 1 else []
        return [(Kind.FORWARD, stage, microbatch), *later]
