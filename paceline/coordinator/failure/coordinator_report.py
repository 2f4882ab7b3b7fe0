"""Report of the coordinator about a run that has ended, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.launchers.base import WorkerExit


@dataclass(frozen=True)
class LastSeen:
    """Last known activity of a lost or late worker, and the ranks that waited for it."""

    step: int | None = None  # step of the worker, or of the run if the worker is silent. None without a heartbeat.
    doing: str = ""  # activity, such as ``in the data loader``
    line: str = ""  # line of the script, such as ``train.py:41``. Empty if unknown.
    waiting: tuple[int, ...] = ()  # ranks that waited for the worker
    seconds: float = 0.0  # time that they had waited
    where: str = ""  # activity of the waiting ranks, such as ``in the all-reduce of bucket 2 of the gradients``


@dataclass(frozen=True)
class LostWorker:
    """Worker that was lost during the run."""

    worker: int  # number of the worker
    rank: int | None  # rank of the worker when it was lost. None if it had no rank.
    time: float  # time of the loss, in seconds since 1970


@dataclass(frozen=True)
class CoordinatorReport:
    """End of a run as seen by the coordinator. Workers are identified by their numbers."""

    code: int | None = None  # exit code that the coordinator has chosen, or None
    reason: str = ""  # reason for the end of the run
    kind: str = ""  # ``hang``, ``ended-early`` or ``not-started``, else empty
    blamed: tuple[int, ...] = ()  # workers that the reason refers to
    elastic: bool = False  # whether lost workers are replaced
    step: int = 0  # number of completed steps
    ranks: Mapping[int, int] = field(default_factory=dict)  # ranks of the last generation by worker
    processes: Mapping[int, tuple[int, str]] = field(default_factory=dict)  # process id and host by worker
    lost: tuple[LostWorker, ...] = ()  # lost workers in the order of detection
    joined: int = 0  # number of workers that replaced others
    leaving: tuple[int, ...] = ()  # workers that were asked to end
    last_seen: Mapping[int, LastSeen] = field(default_factory=dict)  # last known activity of lost or late workers
    # failure reports of workers on other machines
    reports: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    exits: tuple[WorkerExit, ...] = ()  # exits of workers on other machines

    def rank_of(self, worker: int) -> int | None:
        """Return a worker's rank in the last generation or at its loss, or its number before the first generation."""
        if worker in self.ranks:
            return self.ranks[worker]
        known = [loss.rank for loss in self.lost if loss.worker == worker and loss.rank is not None]
        return known[-1] if known else None if self.ranks else worker

    def replaced(self) -> set[int]:
        """Return the lost workers whose loss did not end the run."""
        return {loss.worker for loss in self.lost} - self.ranks.keys() if self.elastic else set()
