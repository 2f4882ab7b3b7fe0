"""Launchers of a simulated run. The agents are Paceline's own, and the processes are the hub's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

from paceline.coordinator.agent import CoordinatorAgent, RemoteAgent
from paceline.coordinator.server import Coordinator
from paceline.coordinator.types import Message
from paceline.coordinator.wire.authentication import AGENT
from paceline.coordinator.wire.connections import Peer
from paceline.launchers.base import Request, WorkerExit
from simulator.hub import Hub
from simulator.network import COORDINATOR, Network, Server

_POLL_SECONDS = 0.1
GRACE_SECONDS = 25.0


class Supervised(Protocol):
    """Operations of launchers on the processes of a run."""

    def begin(self, number: int) -> None:
        """Start a worker."""

    def signal(self, number: int, kill: bool) -> None:
        """Send SIGTERM to a worker, or SIGKILL if ``kill``."""

    def code_of(self, number: int) -> int | None:
        """Return the exit code of a worker, or None while it runs."""


class Launcher:
    """Launcher that starts and watches workers, as ``launchers.workers.Workers`` does."""

    def __init__(self, hub: Hub, processes: Supervised, agent: Any, first: int, workers: int) -> None:
        self._hub, self._processes, self._agent = hub, processes, agent
        self._next = first
        self.running: set[int] = set()
        self.gone = False
        self._due: list[tuple[float, bool]] = []
        self._asked = False
        for _ in range(workers):
            self._start()
        hub.at(_POLL_SECONDS, self._poll)

    def _start(self) -> None:
        number, self._next = self._next, self._next + 1
        self.running.add(number)
        self._processes.begin(number)
        self._agent.started(number, number + 1)

    def collect(self) -> None:
        """Report workers that have ended to the agent, and end the run if it does not tolerate the loss."""
        for number in sorted(self.running if not self.gone else ()):
            if (code := self._processes.code_of(number)) is not None:
                self.running.discard(number)
                tolerated = self._agent.ended(WorkerExit(number, code, self._hub.now, self._asked))
                if not tolerated and not self._due and not self._asked:
                    self._end_soon()

    def _poll(self) -> None:
        if self.gone:
            return
        self.collect()
        while self._due and self._due[0][0] <= self._hub.now:
            kill, self._asked = self._due.pop(0)[1], True
            for number in sorted(self.running):
                self._processes.signal(number, kill)
        if not self._asked and not self._due:
            if self._agent.over():
                self._end_soon()
            for _ in range(self._agent.to_start(False)):
                self._start()
        self._hub.at(_POLL_SECONDS, self._poll)

    def _end_soon(self) -> None:
        asked, killed = self._agent.grace()
        self._due = [(self._hub.now + asked, False), (self._hub.now + killed, True)]


@dataclass
class Slots:
    """Current number of worker slots on the first machine."""

    slots: int


def first_machine(
    hub: Hub, processes: Supervised, coordinator: Coordinator, request: Request, slots: Slots | None
) -> Launcher:
    launch: Any = SimpleNamespace(workers=request.workers, grace_seconds=GRACE_SECONDS)
    agent = CoordinatorAgent(launch, request, coordinator, slots, hub.clock)  # type: ignore[arg-type]
    return Launcher(hub, processes, agent, 0, request.workers)


class RemoteLauncher:
    """Launcher of another machine. Its agent joins the run and then starts workers.

    Args:
        server: coordinator's end of the connection.
        address: address of the machine in the network, a number below that of the coordinator.
    """

    def __init__(
        self, hub: Hub, network: Network, server: Server, processes: Supervised, request: Request, address: int
    ) -> None:
        self._hub, self._network, self._server, self._processes = hub, network, server, processes
        self._request, self.address = request, address
        self.peer = Peer(self, "127.0.0.1", hub.now, None, AGENT)  # type: ignore[arg-type]
        self.launcher: Launcher | None = None
        self.over: Message | None = None
        self.not_joined = self.broken = False
        self.shown = -1
        about: Message = {"script": request.script.name, "name": request.name, "host": str(address), "about": {}}
        self.send({"type": "agent", "workers": request.workers, **about})

    @property
    def running(self) -> set[int]:
        """Numbers of the workers of this machine."""
        return self.launcher.running if self.launcher is not None else set()

    def send(self, message: Message) -> None:
        text = json.dumps(message)
        self._network.carry(self.address, COORDINATOR, lambda: self._server.receive(self.peer, json.loads(text)))

    def receive(self) -> None:
        """Do nothing, because messages are handled on arrival."""

    def deliver(self, message: Message) -> None:
        self._network.carry(COORDINATOR, self.address, lambda: self._take(message))

    def _take(self, message: Message) -> None:
        if self.broken:
            return
        if message["type"] == "run":
            launch: Any = SimpleNamespace(workers=self._request.workers, grace_seconds=GRACE_SECONDS)
            agent = RemoteAgent(launch, self._request, self)  # type: ignore[arg-type]
            self.launcher = Launcher(self._hub, self._processes, agent, message["first"], self._request.workers)
        elif message["type"] == "end":
            self.over = message
        elif message["type"] == "not-joined":
            self.not_joined = True

    def lose(self, kill: Callable[[int], None]) -> None:
        """End the machine and all its workers immediately."""
        self.broken = True
        if self.launcher is not None:
            self.launcher.gone = True
            for number in sorted(self.launcher.running):
                kill(number)
            self.launcher.running.clear()
        self._network.carry(self.address, COORDINATOR, lambda: self._server.disconnected(self.peer))
