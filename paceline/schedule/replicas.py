"""1F1B with stages that are held by different numbers of workers (PipeDream, Harlap et al. 2018, section 3.1).

A slow stage gets more workers, each with a contiguous share of the microbatches. Nothing is repeated regularly then, so
the order is found by going through the step: an operation of a stage with r workers takes r units, whoever is free does
a backward pass if there is one, else a forward pass unless too many microbatches are under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.errors import ConfigError
from paceline.schedule.operations import Kind, Operation
from paceline.schedule.shares import even
from paceline.schedule.transfers import Order, at_least


def counted(stages: int, microbatches: int, replicas: int | Sequence[int]) -> tuple[int, ...]:
    """The number of workers of each stage.

    Raises:
        ConfigError: no stages, fewer microbatches than replicas, or replicas of another number of stages.
    """
    at_least(1, stages=stages)
    counts = (replicas,) * stages if isinstance(replicas, int) else tuple(replicas)
    if len(counts) != stages:
        raise ConfigError(f"replicas {counts} are those of {len(counts)} stages, not of {stages}: name one for each")
    for count in counts:
        at_least(1, replicas=count)
    at_least(max(counts), microbatches=microbatches)
    return counts


def in_flight(counts: Sequence[int], stage: int) -> int:
    """So many microbatches keep all workers from this stage on busy: for each replica, those under way."""
    return -(-sum(counts[stage:]) // counts[stage])


@dataclass
class _Worker:
    """A worker of the step that is gone through.

    Attributes:
        stage: the one it holds.
        share: its microbatches.
        most: how many may be under way at a time.
        free: when it has done what it does.
        order: what it has done.
    """

    stage: int
    share: range
    most: int
    free: int = 0
    order: Order = field(default_factory=list)

    def next(self, kind: Kind) -> int | None:
        """The next microbatch of a kind, if one may come."""
        forwards, backwards = (sum(one.kind == each for one in self.order) for each in (Kind.FORWARD, Kind.BACKWARD))
        if kind == Kind.FORWARD:
            may = forwards - backwards < self.most and forwards < len(self.share)
            return self.share[forwards] if may else None
        return self.share[backwards] if backwards < forwards else None


def in_turns(counts: Sequence[int], microbatches: int) -> list[Order]:
    """What each worker computes.

    Args:
        counts: the number of workers of each stage.
        microbatches: how many go through the pipeline.
    """
    workers = [
        _Worker(stage, share, in_flight(counts, stage))
        for stage, count in enumerate(counts)
        for share in even(microbatches, count)
    ]
    done: dict[tuple[Kind, int, int], int] = {}
    now = 0
    while len(done) < 2 * len(counts) * microbatches:
        for worker in workers:
            if worker.free <= now:
                _go_on(worker, now, counts, done)
        now = min(one for one in done.values() if one > now)
    return [worker.order for worker in workers]


def _go_on(worker: _Worker, now: int, counts: Sequence[int], done: dict[tuple[Kind, int, int], int]) -> None:
    """Let a free worker begin what it can, a backward pass first."""
    for kind, before in ((Kind.BACKWARD, worker.stage + 1), (Kind.FORWARD, worker.stage - 1)):
        microbatch = worker.next(kind)
        if microbatch is None:
            continue
        if 0 <= before < len(counts) and done.get((kind, before, microbatch), now + 1) > now:
            continue
        worker.free = now + counts[worker.stage]
        worker.order.append(Operation(kind, worker.stage, microbatch))
        done[kind, worker.stage, microbatch] = worker.free
        return
