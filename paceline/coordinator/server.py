"""The coordinator: the one place that knows who trains. A thread of the first launcher, so that it survives any worker.

Workers and the agents of other machines keep a connection to it (:mod:`paceline.coordinator.wire.connections`). A
connection that ends proves nothing about a worker of the coordinator's own machine, where the agent sees the process
end; of a worker elsewhere it is the evidence. A worker speaks for itself, and an agent for the workers that it started.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.coordinator.failure.coordinator_report import CoordinatorReport
from paceline.coordinator.failure.worker_report import describe_exit
from paceline.coordinator.hang_detection import WorkerStatus
from paceline.coordinator.key_values import KeyValues
from paceline.coordinator.lateness import LatenessPolicy
from paceline.coordinator.membership import MembershipProtocol
from paceline.coordinator.monitor import Alert, RunMonitor
from paceline.coordinator.types import Bounds, Message, RunInfo
from paceline.coordinator.wire.authentication import AGENT
from paceline.coordinator.wire.connections import TICK_SECONDS, Connections, Peer
from paceline.coordinator.wire.validation import BLOCK
from paceline.errors import PREEMPTED
from paceline.launchers.base import WorkerExit
from paceline.launchers.local.kernel import is_ending
from paceline.launchers.output import Show

_AGENTS_SECONDS = 60.0


@dataclass
class Agent:
    """The agent of another machine.

    Attributes:
        peer: its connection.
        number: of the machine; its workers are numbered from ``BLOCK`` times that on.
        workers: how many it started with.
        running: the workers that it has started and that have not ended, as it says.
        end_sent: the end of the run was sent to it.
    """

    peer: Peer
    number: int
    workers: int
    running: set[int] = field(default_factory=set)
    end_sent: bool = False


@dataclass(frozen=True)
class System:
    """Connections, clock and process checks of a coordinator. The simulator replaces them.

    Attributes:
        connect: opens the connections.
        clock: the seconds in which deadlines are counted.
        is_ending: tells whether a process has ended, or is about to.
    """

    connect: Callable[..., Connections] = Connections
    clock: Callable[[], float] = time.monotonic
    is_ending: Callable[[int], bool] = is_ending


class Coordinator:
    """Receives what workers and agents report, and lets :class:`MembershipProtocol` decide.

    Args:
        listener: see :func:`paceline.coordinator.wire.messages.listen`.
        bounds: how many workers there must and may be.
        record: called with each event.
        run: what the launchers of a run have in common.
        local_workers: how many start on this machine.
        show: called with a line that rank 0 prints on another machine.
        system: what it uses of its machine.
    """

    def __init__(
        self,
        listener: socket.socket,
        bounds: Bounds,
        record: Callable[..., None],
        run: RunInfo,
        local_workers: int = 0,
        show: Show = lambda name, line: None,
        system: System | None = None,
    ) -> None:
        self._lock = threading.RLock()
        self._record = record
        self._run = run
        self._workers: dict[int, Peer] = {}
        self._ended: set[int] = set()  # what they said before may still be on its way
        self._agents: dict[int, Agent] = {}
        system = system or System()
        self._clock, self._is_ending = system.clock, system.is_ending
        self.monitor = RunMonitor(record, system.clock)
        self.membership = MembershipProtocol(bounds, self._send, self._record_change)
        self._key_values = KeyValues(lambda number, message: self._send([number], message))
        self._lateness = LatenessPolicy(self.membership, self.monitor, system.clock)
        self._local_workers = local_workers
        self._show = show
        self._agents_seen = 0
        self._connections = system.connect(listener, self._key, self, self._lock, record)
        self._connections.start()

    def close(self) -> None:
        """End all connections."""
        self._connections.close()

    def _key(self, role: str) -> bytes:
        """The key of a role; that of a worker is good for this run alone."""
        secret = self._run.secret
        return secret.key(role) if role == AGENT else secret.of_run(self._run.id).key(role)

    def started(self, number: int, pid: int) -> None:
        """Expect a worker that was started on this machine."""
        with self._lock:
            self.monitor.started(number, pid)
            self.membership.started(number)

    def announce_start(self) -> None:
        """Expect a worker that is yet to be started."""
        with self._lock:
            self.membership.announce_start()

    def ended(self, number: int, code: int, report: Message, replace: Callable[[], None]) -> bool:
        """Take note of how a worker's process ended, which only its agent knows; false if that is how the run ends.

        Args:
            number: of the worker.
            code: its exit code; negative: the signal that killed it.
            report: what the worker wrote down of its failure; empty if nothing.
            replace: called before the worker counts as lost.
        """
        with self._lock:
            now, membership = self._clock(), self.membership
            self._ended.add(number)
            reason = f"{membership.name(number)} {describe_exit(code)}"
            if code == 0:
                membership.finish(number, now)
            elif code == PREEMPTED:
                membership.leave(number, now)
            elif report and not report["consequence"]:
                reason = f"{membership.name(number)} failed: {report['type']}: {report['message']}"
                return not self._fail(number, report.get("exit_code", 1), reason, report)
            elif not report and code > 0 and self._by_script(number):
                return not self._fail(number, code, reason, report)
            else:
                replace()
                self.monitor.exit_texts[number] = reason
                membership.lose(number, reason, now)
            return True

    def _by_script(self, number: int) -> bool:
        """Whether a worker that ended with an exit code of its own would end with it again if it were replaced."""
        worker = self.membership.workers[number]
        return worker.ending or not worker.joined

    def _fail(self, number: int, code: int, reason: str, report: Message) -> bool:
        """Take note that a worker's script has failed; true if that ends the run."""
        now = self._clock()
        if not self.membership.needs(number):
            self._record("not-joined", worker=number, reason=reason)
            if agent := self._agents.get(number // BLOCK):
                self._connections.send([agent.peer], {"type": "not-joined"})
            self.membership.lose(number, reason, now)
            return False
        if report:
            self.monitor.reports[number] = report
        self.membership.end(code, reason, now, save=True)
        return True

    def want(self, workers: int) -> None:
        """Change how many workers are wanted on this machine."""
        with self._lock:
            self._local_workers = workers
            self._count_machines()

    def report(self, elastic: bool) -> CoordinatorReport:
        """Report how the run ended."""
        with self._lock:
            return self.monitor.report(self.membership, self._lateness.statuses(self._clock()), elastic)

    @property
    def members(self) -> list[int]:
        """The workers in the order of their ranks."""
        return list(self.membership.members)

    @property
    def shown(self) -> int:
        """The worker whose output is shown: rank 0, or the one that is likely to be."""
        members = self.membership.members
        return members[0] if members else 0 if self._local_workers else BLOCK

    def preempt(self) -> None:
        """End the run if it does not end with the workers here: the coordinator goes away with this machine."""
        with self._lock:
            if self._agents or not self._local_workers:
                self.membership.end(PREEMPTED, "preempted", self._clock(), save=True)

    @property
    def waiting(self) -> bool:
        """Whether the next generation has yet to form."""
        return self.membership.changing or self.membership.generation < 0

    @property
    def has_agents(self) -> bool:
        """Whether other machines take part."""
        return bool(self._agents)

    @property
    def over(self) -> Message | None:
        """How the run ended, if it has."""
        return self.membership.over

    def handle(self, peer: Peer, message: Message) -> None:
        """Take a message of a worker or an agent, which has been checked."""
        number, agent = peer.worker, self._agent(peer)
        if number is not None:
            if number not in self._ended:
                self._handle_worker(peer, number, message)
        elif agent is not None and message["type"] != "agent":
            self._handle_agent(agent, message)
        elif agent is None and message["type"] == "agent":
            self._register_agent(peer, message)
        else:
            self._connections.refuse(peer, "an agent joins once, and first")

    def _handle_worker(self, peer: Peer, number: int, message: Message) -> None:
        kind, now = message["type"], self._clock()
        if kind == "hello":
            self._workers[number] = peer
            self.monitor.hang_seconds = message["hang_seconds"]
            self.monitor.timeout_seconds = message["timeout_seconds"]
            self.membership.register(number, message["about"], message["facts"], message["session"], message["fits"])
        elif self._workers.get(number) is not peer:  # not yet, or no longer: its script has started again
            return
        elif kind == "ready":
            progress = message["progress"]
            self._lateness.forget(number)
            self.membership.workers[number].about["arena"] = message["arena"]
            self._check_reported_exits(message["ended"], now)
            self.membership.ready(
                number,
                tuple(progress) if progress else None,
                now,
                leaving=message["leaving"],
                planned=message["planned"],
            )
        elif kind == "heartbeat":
            self._lateness.heartbeat(number, WorkerStatus(rank=-1, **message["status"]))
        elif kind == "ending":
            self.membership.workers[number].ending = True
        elif kind == "store" and self._is_now(number, message["generation"]):
            self._key_values.handle(number, message)

    def _is_now(self, number: int, generation: int) -> bool:
        return self.membership.rank_of(number) is not None and generation == self.membership.generation

    def _agent(self, peer: Peer) -> Agent | None:
        return next((agent for agent in self._agents.values() if agent.peer is peer), None)

    def _handle_agent(self, agent: Agent, message: Message) -> None:
        """Take an agent's word for what becomes of the workers that it started."""
        if message["type"] == "output":
            self._show(message["stream"], message["line"])
            return
        number = message["worker"]
        if message["type"] == "started" and number // BLOCK == agent.number:
            agent.running.add(number)
            self.membership.started(number)
        elif message["type"] == "ended" and number in agent.running:
            agent.running.remove(number)
            self._handle_exit(message)
        else:
            self._connections.refuse(agent.peer, f"worker {number} is not on its machine")

    def disconnected(self, peer: Peer) -> None:
        """Take note that the connection of a worker or an agent has ended."""
        number = peer.worker
        if number is not None and self._workers.get(number) is peer:
            del self._workers[number]
            if number >= BLOCK and not (self.membership.workers[number].ending and self._reports_exit(number)):
                self._cut_off(number)
        if agent := self._agent(peer):
            del self._agents[agent.number]
            self._record("agent-left", agent=agent.number)
            for number in [one for one in self.membership.workers if one // BLOCK == agent.number]:
                if number not in self._workers:
                    self._cut_off(number)
            self._count_machines()

    def _reports_exit(self, number: int) -> bool:
        """Return whether the exit code of a worker whose script has ended will be reported: by its machine's agent."""
        return number // BLOCK in self._agents

    def _cut_off(self, number: int) -> None:
        """Lose a worker of another machine: nobody can say any more how it is."""
        self.membership.fenced = True
        self.membership.lose(number, f"{self.membership.name(number)} cannot be reached", self._clock())

    def _check_reported_exits(self, ended: list[int], now: float) -> None:
        """Check a worker's word that others have ended; on this machine that shows before their agent sees it."""
        for number in ended:
            worker = self.membership.workers.get(number)
            if worker is None or worker.ending or number >= BLOCK or not worker.about:
                continue
            if self._is_ending(worker.about["pid"]):
                self.membership.lose(number, f"{self.membership.name(number)} ended", now, confirmed=False)

    def _handle_exit(self, message: Message) -> None:
        """Take note of how a worker of another machine ended, as its agent reports."""
        number = message["worker"]
        self.monitor.exits.append(
            WorkerExit(number, message["code"], time.time(), False, out_of_memory=message["out_of_memory"])
        )
        self.ended(number, message["code"], message["report"], lambda: None)  # its agent replaces it

    def _register_agent(self, peer: Peer, message: Message) -> None:
        """Let a machine join, if what it starts is the same run."""
        if other := self._run.difference(message["script"], message["name"]):
            self._connections.send([peer], {"type": "refused", "reason": other})
            self._connections.refuse(peer, other)
            return
        self._agents_seen += 1
        number = self._agents_seen
        self._agents[number] = Agent(peer, number, message["workers"])
        run = {"id": self._run.id, "name": self._run.name, "resume": self._run.resume}
        self._connections.send([peer], {"type": "run", "first": number * BLOCK, **run})
        self._connections.send([peer], {"type": "shown", "worker": self.shown})
        self._record("agent-joined", agent=number, host=message["host"])
        self.monitor.alerts.extend(
            Alert("unlike", line) for line in self._run.differences(message["host"], message["about"])
        )
        self._count_machines()

    def _count_machines(self) -> None:
        bounds = self.membership.bounds
        wanted = self._local_workers + sum(agent.workers for agent in self._agents.values())
        self.membership.resize(replace(bounds, wanted=max(bounds.least, min(bounds.most, wanted))), self._clock())

    def _send(self, numbers: Sequence[int], message: Message) -> None:
        self._connections.send([self._workers[number] for number in numbers if number in self._workers], message)

    def wait_for_agents(self) -> None:
        """Wait until the other machines know that the run is over, if it is; a minute at most."""
        deadline = time.monotonic() + _AGENTS_SECONDS
        while time.monotonic() < deadline:
            with self._lock:
                if self.over is None or all(agent.end_sent for agent in self._agents.values()):
                    return
            time.sleep(TICK_SECONDS / 5)

    def _send_end_to_agents(self) -> None:
        """Tell the agents of the other machines that the run is over."""
        untold = [agent for agent in self._agents.values() if not agent.end_sent]
        for agent in untold:
            agent.end_sent = True
        self._connections.send([agent.peer for agent in untold], {"type": "end", **(self.membership.over or {})})

    def name(self, number: int) -> str:
        """Name a worker by its rank, process and machine."""
        with self._lock:
            return self.membership.name(number)

    def tick(self, now: float) -> None:
        """Do what is due."""
        self.membership.advance(now)
        if self.membership.over is not None:
            self._send_end_to_agents()
        else:
            self._lateness.check(now)

    def _record_change(self, event: str, **fields: Any) -> None:
        if event == "membership":
            peers = [agent.peer for agent in self._agents.values()]
            self._connections.send(peers, {"type": "shown", "worker": self.shown})
            self._lateness.reset()
            self._key_values.clear()
        self.monitor.record(event, self._lateness.statuses(self._clock()), **fields)
