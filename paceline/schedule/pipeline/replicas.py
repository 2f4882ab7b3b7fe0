"""Pipelines whose stages have different numbers of workers (PipeDream, Harlap et al. 2018, section 3.1).

A slow stage gets more workers, each with a contiguous share of the microbatches. Stage 0, twice as slow as stage 1, on
two workers; four microbatches::

    0  F0--- F1---    B0---------       B1---------
    1  F2--- F3---             B2---------       B3---------
    2        F0 B0--- F2 B2--- F1 B1--- F3 B3---

Stage 1 takes the microbatches as they arrive: 0, 2, 1, 3. In increasing order all replicas but one would wait. A *run*
is a range of microbatches that have the same worker in every stage, which takes them in order. A simulation of the step
gives the order of the passes: a forward pass of a stage with r workers takes r units of time, a backward pass 2 r. A
free worker begins the next pass that is ready. In 1F1B it prefers a backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.errors import ConfigError
from paceline.schedule.pipeline.operations import Kind, Operation
from paceline.schedule.pipeline.transfers import Order, check_at_least
from paceline.schedule.shares import even


def replica_counts(stages: int, replicas: int | Sequence[int]) -> tuple[int, ...]:
    """Return the number of workers of each stage."""
    check_at_least(1, stages=stages)
    counts = (replicas,) * stages if isinstance(replicas, int) else tuple(replicas)
    if len(counts) != stages:
        raise ConfigError(
            f"replicas {counts} are for {len(counts)} stages, but there are {stages}: give one for each stage"
        )
    check_at_least(1, replicas=min(counts))
    return counts


def runs(counts: Sequence[int], microbatches: int) -> tuple[range, ...]:
    """Return the longest ranges of microbatches that have the same worker in every stage. Each is computed in order.

    >>> runs((2, 3), 6)
    (range(0, 2), range(2, 3), range(3, 4), range(4, 6))
    """
    starts = sorted({share.start for each in counts for share in even(microbatches, each)})
    return tuple(range(start, stop) for start, stop in zip(starts, [*starts[1:], microbatches], strict=True))


def forwards_first(counts: Sequence[int], microbatches: int) -> list[Order]:
    """Return the order of each worker in GPipe: all its forward passes, then all its backward passes."""
    return _Simulation(counts, microbatches, most=None).orders()


def backwards_first(counts: Sequence[int], microbatches: int) -> list[Order]:
    """Return the order of each worker in 1F1B, with the fewest microbatches in flight that do not prolong the step.

    A worker may have in flight at least the number of workers of its stage and later ones, divided by its replicas.
    """
    least = [-(-sum(counts[stage:]) // counts[stage]) for stage in range(len(counts))]
    units = _Simulation(counts, microbatches, [microbatches] * len(counts)).units
    steps = (_Simulation(counts, microbatches, [each + more for each in least]) for more in range(microbatches + 1))
    return next(step.orders() for step in steps if step.units <= units)


@dataclass
class _Worker:
    """A worker in the simulation."""

    stage: int  # stage that the worker holds
    runs: tuple[range, ...]  # runs of microbatches in the worker's share
    done: dict[Kind, list[int]]  # number of passes begun, for each kind and run
    free: int = 0  # time at which the current pass ends
    order: Order = field(default_factory=list)  # passes begun, in order

    def next(self, kind: Kind) -> list[int]:
        """Return the next microbatch of each run, beginning with the run that is furthest behind."""
        runs = [(done, run) for done, run in zip(self.done[kind], self.runs, strict=True) if done < len(run)]
        return [run[done] for done, run in sorted(runs, key=lambda one: one[0] / len(one[1]))]

    def begun(self, kind: Kind) -> int:
        return sum(self.done[kind])

    def begin(self, kind: Kind, microbatch: int, end: int) -> None:
        """Begin the next pass of a run."""
        self.order.append(Operation(kind, self.stage, microbatch))
        self.free = end
        for index, run in enumerate(self.runs):
            self.done[kind][index] += microbatch in run


class _Simulation:
    """Simulation of a step, in units of time.

    Args:
        counts: number of workers of each stage.
        most: maximum number of microbatches in flight per worker of each stage. None to run all forward passes first.
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
        return [worker.order for worker in self._workers]

    def _advance(self, worker: _Worker, now: int) -> None:
        """Begin a pass that is ready on a free worker."""
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
        """Return the passes that must end before a pass can begin."""
        if kind == Kind.FORWARD:
            return [(kind, stage - 1, microbatch)] if stage else []
        later = [(kind, stage + 1, microbatch)] if stage < len(self._counts) - 1 else []
        return [(Kind.FORWARD, stage, microbatch), *later]
