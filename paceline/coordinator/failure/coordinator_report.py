"""What the coordinator knows of a run that has ended, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.launchers.base import WorkerExit


@dataclass(frozen=True)
class LastSeen:
    """What a worker was doing, and who waited for it, when it was lost or late.

    Attributes:
        step: the step it was at; None without a heartbeat.
        doing: such as ``in the data loader``.
        line: of the script, ``train.py:41``; empty if unknown.
        waiting: the ranks that waited for it.
        seconds: how long they had waited.
        where: what they were doing, such as ``in the all-reduce of bucket 2 of the gradients``.
    """

    step: int | None = None
    doing: str = ""
    line: str = ""
    waiting: tuple[int, ...] = ()
    seconds: float = 0.0
    where: str = ""


@dataclass(frozen=True)
class LostWorker:
    """A worker that was lost during the run.

    Attributes:
        worker: its number.
        rank: at that time.
        time: when, in seconds since 1970.
    """

    worker: int
    rank: int | None
    time: float


@dataclass(frozen=True)
class CoordinatorReport:
    """How the run ended, as the coordinator saw it. Workers are named by their numbers.

    Attributes:
        code: the exit code that was decided on, if any.
        reason: why.
        kind: ``hang``, ``ended-early`` or ``not-started``; else empty.
        blamed: whom the reason is about.
        elastic: whether lost workers were replaced.
        step: how many steps were done.
        ranks: of the workers of the last generation.
        processes: process id and host of each worker.
        lost: in the order in which it was noticed.
        joined: how many workers replaced others.
        leaving: workers that were asked to end.
        last_seen: of workers that were lost or late.
        reports: the failure reports of workers of other machines.
        exits: how workers of other machines ended.
    """

    code: int | None = None
    reason: str = ""
    kind: str = ""
    blamed: tuple[int, ...] = ()
    elastic: bool = False
    step: int = 0
    ranks: Mapping[int, int] = field(default_factory=dict)
    processes: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    lost: tuple[LostWorker, ...] = ()
    joined: int = 0
    leaving: tuple[int, ...] = ()
    last_seen: Mapping[int, LastSeen] = field(default_factory=dict)
    reports: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    exits: tuple[WorkerExit, ...] = ()

    def rank_of(self, worker: int) -> int | None:
        """Return its rank in the last generation, or when it was lost; before the first generation its number."""
        if worker in self.ranks:
            return self.ranks[worker]
        known = [loss.rank for loss in self.lost if loss.worker == worker and loss.rank is not None]
        return known[-1] if known else None if self.ranks else worker

    def replaced(self) -> set[int]:
        """Workers whose loss did not end the run."""
        return {loss.worker for loss in self.lost} - self.ranks.keys() if self.elastic else set()
