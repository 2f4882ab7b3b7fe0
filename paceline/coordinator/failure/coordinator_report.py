"""Report of the coordinator about a run that has ended, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.launchers.base import WorkerExit


@dataclass(frozen=True)
class LastSeen:
    """Last known activity of a lost or late worker, and the ranks that waited for it.

    Attributes:
        step: step of the worker, or of the run if the worker is silent. None without a heartbeat.
        doing: activity, such as ``in the data loader``.
        line: line of the script, such as ``train.py:41``. Empty if unknown.
        waiting: ranks that waited for the worker.
        seconds: time that they had waited.
        where: activity of the waiting ranks, such as ``in the all-reduce of bucket 2 of the gradients``.
    """

    step: int | None = None
    doing: str = ""
    line: str = ""
    waiting: tuple[int, ...] = ()
    seconds: float = 0.0
    where: str = ""


@dataclass(frozen=True)
class LostWorker:
    """Worker that was lost during the run.

    Attributes:
        worker: number of the worker.
        rank: rank of the worker when it was lost. None if it had no rank.
        time: time of the loss, in seconds since 1970.
    """

    worker: int
    rank: int | None
    time: float


@dataclass(frozen=True)
class CoordinatorReport:
    """End of a run as seen by the coordinator. Workers are identified by their numbers.

    Attributes:
        code: exit code that the coordinator has chosen, or None.
        reason: reason for the end of the run.
        kind: ``hang``, ``ended-early`` or ``not-started``, else empty.
        blamed: workers that the reason refers to.
        elastic: whether lost workers are replaced.
        step: number of completed steps.
        ranks: ranks of the last generation by worker.
        processes: process id and host by worker.
        lost: lost workers in the order of detection.
        joined: number of workers that replaced others.
        leaving: workers that were asked to end.
        last_seen: last known activity of lost or late workers.
        reports: failure reports of workers on other machines.
        exits: exits of workers on other machines.
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
        """Return a worker's rank in the last generation or at its loss, or its number before the first generation."""
        if worker in self.ranks:
            return self.ranks[worker]
        known = [loss.rank for loss in self.lost if loss.worker == worker and loss.rank is not None]
        return known[-1] if known else None if self.ranks else worker

    def replaced(self) -> set[int]:
        """Return the lost workers whose loss did not end the run."""
        return {loss.worker for loss in self.lost} - self.ranks.keys() if self.elastic else set()
