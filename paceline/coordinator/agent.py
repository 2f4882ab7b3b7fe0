"""Agents: each supervises the workers of its machine, replaces lost workers, and reports to the coordinator.

The agent of the first machine owns the coordinator; the others report to it over the network.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from paceline.coordinator.failure.worker_report import record_of
from paceline.coordinator.machines import AgentClient
from paceline.coordinator.server import Coordinator
from paceline.coordinator.types import Bounds, Message
from paceline.errors import PREEMPTED
from paceline.launchers.base import Launch, Request, WorkerExit
from paceline.launchers.clusters.discovery import SlotsHere
from paceline.launchers.workers import Supervisor

_RESTARTS = 100  # largest number of replacement workers that an agent starts in one run
_RESTART_DELAY_SECONDS = 1.0
"""Delay before a replacement starts. It keeps a core busy for a second, so survivors recover and take a step first.

The next standby always waits so long, because its start takes a third of the processor time of a recovery. It does not
wait for longer, because without a standby the next recovery takes twice as long.
"""
_GRACE_BEFORE_TRAINING = 1.0, 3.0
_GRACE = 3.0, 10.0
"""Delays for workers that have nothing to save: those left when all members have finished may hang."""
_LAST_SECONDS = 10.0


def bounds_of(request: Request) -> Bounds:
    """Return the bounds on the number of workers for a launch request."""
    here = request.workers
    _, most = request.nodes or (1, 1)
    patience = request.patience_seconds if request.elastic else 0.0
    return Bounds(
        least=request.smallest,
        most=request.most or here * most,
        wanted=max(request.smallest, here),
        replaces=request.nodes is not None,
        patience=patience,
        drops=request.elastic,
    )


class CoordinatorAgent(Supervisor):
    """Agent on the coordinator's machine.

    Args:
        discovery: source of the current number of slots on this machine. Defaults to the requested number of workers.
    """

    def __init__(
        self,
        launch: Launch,
        request: Request,
        coordinator: Coordinator,
        discovery: SlotsHere | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._launch, self._clock = launch, clock
        self._elastic = request.elastic
        self._coordinator = coordinator
        self._restarts = 0
        self._due = [0.0] * request.standby
        self._standby = request.standby
        self._discovery, self._wanted, self._running = discovery, request.workers, 0
        self._bounds = bounds_of(request)
        self._last = math.inf  # deadline for the agents of other machines to leave

    def started(self, number: int, pid: int) -> None:
        self._running += 1
        self._coordinator.started(number, pid)

    def ended(self, one: WorkerExit) -> bool:
        self._running -= 1
        return self._coordinator.ended(one.worker, one.code, record_of(self._launch, one.worker), self._replace)

    def _replace(self) -> None:
        wanted = self._discovery is None or self._running + len(self._due) < self._wanted
        if self._elastic and self._restarts < _RESTARTS and self._coordinator.over is None and wanted:
            self._restarts += 1
            self._due.append(self._clock() + _RESTART_DELAY_SECONDS)
            self._coordinator.announce_start()

    def _follow(self, slots: int) -> None:
        """Schedule more workers if the number of slots has grown, and notify the coordinator of the wanted number."""
        wanted = max(self._bounds.least, min(self._bounds.most, slots))
        here = self._running + len(self._due) - self._standby  # a smaller number of slots stops no worker
        more = wanted - max(self._wanted, here)
        if wanted != self._wanted:
            self._wanted = wanted
            self._coordinator.want(wanted)
        for _ in range(more):
            self._due.append(self._clock())
            self._coordinator.announce_start()

    def to_start(self, at_once: bool) -> int:
        if self._discovery is not None:
            self._follow(self._discovery.slots)
        now = self._clock()
        hurries = bool(self._due) and (at_once or self._coordinator.waiting) and self._coordinator.is_short
        due = [when for when in self._due if hurries or when <= now]
        self._due = self._due[len(due) :]
        return len(due) if self._coordinator.over is None else 0

    def shown(self) -> int:
        return self._coordinator.shown

    def over(self) -> bool:
        return self._coordinator.over is not None

    def waits(self) -> bool:
        if self._coordinator.over is None:
            return self._coordinator.has_agents or not self._launch.workers
        self._last = min(self._last, self._clock() + self._launch.grace_seconds + _LAST_SECONDS)
        return not self._launch.workers and self._coordinator.has_agents and self._clock() < self._last

    def interrupted(self) -> None:
        self._coordinator.preempt()

    def grace(self) -> tuple[float, float]:
        if not self._coordinator.members:
            return _GRACE_BEFORE_TRAINING
        return _grace(self._launch, self._coordinator.over) if self._elastic else _GRACE


class RemoteAgent(Supervisor):
    """Agent on any other machine, whose workers report by themselves that they leave."""

    def __init__(self, launch: Launch, request: Request, client: AgentClient) -> None:
        self._launch, self._client = launch, client
        self._restarts = 0
        self._to_start = request.standby

    def started(self, number: int, pid: int) -> None:
        self._client.send({"type": "started", "worker": number})

    def ended(self, one: WorkerExit) -> bool:
        report = {} if one.code == 0 else record_of(self._launch, one.worker)
        message: dict[str, Any] = {
            "type": "ended",
            "worker": one.worker,
            "code": one.code,
            "out_of_memory": one.out_of_memory,
        }
        self._client.send({**message, "report": report})
        failed = report and not report["consequence"]
        if one.code not in (0, PREEMPTED) and not failed and self._restarts < _RESTARTS:
            self._restarts += 1
            self._to_start += 1
        return True

    def to_start(self, at_once: bool) -> int:
        count, self._to_start = self._to_start, 0
        return 0 if self.over() or self._client.not_joined else count

    def shown(self) -> int:
        return self._client.shown

    def over(self) -> bool:
        self._client.receive()
        return self._client.broken or self._client.over is not None

    def grace(self) -> tuple[float, float]:
        return _GRACE if self._client.broken else _grace(self._launch, self._client.over)


def _grace(launch: Launch, over: Message | None) -> tuple[float, float]:
    """Return the delays for workers of an elastic run. When all members have finished, nothing is left to save."""
    finished = over is not None and over["code"] == 0
    return _GRACE if finished else (launch.grace_seconds, launch.grace_seconds + 5.0)
