"""Coordinator: the single authority on the membership. It is a thread of the first launcher, so it survives any worker.

Workers and remote agents keep a connection to it (:mod:`paceline.coordinator.wire.connections`). A closed connection
does not prove the loss of a worker on the coordinator's machine, where the agent sees the process end, but it does for
other machines. Workers may report only about themselves, agents only about the workers that they have started.
"""

from __future__ import annotations

import signal
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
from paceline.coordinator.wire import clock
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
    """Agent of another machine."""

    peer: Peer
    number: int  # number of the machine. Its workers are numbered from ``number * BLOCK``.
    workers: int  # number of workers that it started with
    running: set[int] = field(default_factory=set)  # numbers of its workers that are running, as reported by the agent
    exits: dict[int, Message] = field(default_factory=dict)  # reported exits of workers that are still connected
    end_sent: bool = False  # whether the end of the run has been sent to the agent


@dataclass(frozen=True)
class System:
    """Connections, clock and process checks of a coordinator. The simulator replaces them."""

    connect: Callable[..., Connections] = Connections  # function that creates the connections
    clock: Callable[[], float] = time.monotonic  # clock for deadlines, in seconds
    is_ending: Callable[[int], bool] = is_ending  # function that returns whether a process has ended or is about to end


class Coordinator:
    """Server that receives the reports of workers and agents. :class:`MembershipProtocol` makes the decisions.

    Args:
        local_workers: number of workers that start on this machine. Defaults to 0.
        show: function that shows a line of output that rank 0 prints on another machine.
        system: connections, clock and process checks. Defaults to the real ones.
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
        self._record, self._run = record, run
        self._workers: dict[int, Peer] = {}
        self._ended: set[int] = set()  # ended workers, whose late messages are ignored
        self._agents: dict[int, Agent] = {}
        system = system or System()
        self._clock, self._is_ending = system.clock, system.is_ending
        self.monitor = RunMonitor(record, system.clock)
        self.membership = MembershipProtocol(bounds, self._send, self._record_change)
        self._key_values = KeyValues(lambda number, message: self._send([number], message))
        self._lateness = LatenessPolicy(self.membership, self.monitor, system.clock)
        self._local_workers, self._show = local_workers, show
        self._agents_seen = 0
        self._connections = system.connect(listener, self._key, self, self._lock, record)
        self._connections.start()

    def close(self) -> None:
        self._connections.close()

    def _key(self, role: str) -> bytes:
        """Return the key of a role. A worker's key is valid for this run only."""
        secret = self._run.secret
        return secret.key(role) if role == AGENT else secret.of_run(self._run.id).key(role)

    def started(self, number: int, pid: int) -> None:
        """Add a worker process that has been started on this machine."""
        with self._lock:
            self.monitor.started(number, pid)
            self.membership.started(number)

    def announce_start(self) -> None:
        """Expect a worker that will be started."""
        with self._lock:
            self.membership.announce_start()

    def ended(self, number: int, code: int, report: Message, replace: Callable[[], None]) -> bool:
        """Handle the end of a worker's process, as its agent reports. Return False if this failure ends the run.

        Args:
            code: exit code, or the negative number of the signal that killed the process.
            report: failure record that the worker has written; empty if there is none.
            replace: function that is called before the worker counts as lost, to schedule a replacement.
        """
        with self._lock:
            now, membership = self._clock(), self.membership
            if (peer := self._workers.get(number)) is not None:
                self._connections.drain(peer)  # the worker may have reported the end of its script just before
            self._ended.add(number)
            reason = f"{membership.name(number)} {describe_exit(code)}"
            if code == 0 or (code == -signal.SIGKILL and not report and self._lasts(number)):
                membership.finish(number, now)
            elif code == PREEMPTED:
                membership.leave(number, now)
            elif report and not report["consequence"]:
                reason = f"{membership.name(number)} failed: {report['type']}: {report['message']}"
                return not self._fail(number, report.get("exit_code", 1), reason, report)
            elif membership.workers[number].unfit or (not report and code > 0 and self._by_script(number)):
                return not self._fail(number, code, reason, report)
            else:
                replace()
                self.monitor.exit_texts[number] = reason
                membership.lose(number, reason, now)
            return True

    def _lasts(self, number: int) -> bool:
        """Return whether a kill of this worker loses nothing: its script had ended, in a run that outlasts losses."""
        return self.membership.bounds.drops and self.membership.workers[number].ending

    def _by_script(self, number: int) -> bool:
        """Return whether a replacement would fail in the same way: the script had ended or had never joined the run."""
        worker = self.membership.workers[number]
        return worker.ending or not worker.joined

    def _fail(self, number: int, code: int, reason: str, report: Message) -> bool:
        """Handle the failure of a worker's script. Return whether it ends the run."""
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
        with self._lock:
            self._local_workers = workers
            self._count_machines()

    def report(self, elastic: bool) -> CoordinatorReport:
        """Return the report of the run after its end."""
        with self._lock:
            return self.monitor.report(self.membership, self._lateness.statuses(self._clock()), elastic)

    @property
    def members(self) -> list[int]:
        """Numbers of the members, in the order of their ranks."""
        return list(self.membership.members)

    @property
    def shown(self) -> int:
        """Number of the worker whose output is shown: rank 0, or before the start the worker expected to become it."""
        members = self.membership.members
        return members[0] if members else 0 if self._local_workers else BLOCK

    def preempt(self) -> None:
        """End the run as preempted if it has workers elsewhere, because the coordinator is lost with this machine."""
        with self._lock:
            if self._agents or not self._local_workers:
                self.membership.end(PREEMPTED, "preempted", self._clock(), save=True)

    @property
    def waiting(self) -> bool:
        """Whether the next generation has yet to form."""
        return self.membership.changing or self.membership.generation < 0

    @property
    def is_short(self) -> bool:
        """Whether the run lacks workers that no standby replaces."""
        with self._lock:
            return self.membership.is_short

    @property
    def has_agents(self) -> bool:
        """Whether agents of other machines are connected."""
        return bool(self._agents)

    @property
    def over(self) -> Message | None:
        """Message on the end of the run; None while it continues."""
        return self.membership.over

    def handle(self, peer: Peer, message: Message) -> None:
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
        if kind == "clock":
            self._connections.send([peer], clock.answer(message, self._run.id, time.time()))
        elif kind == "hello":
            self._workers[number] = peer
            self.monitor.hang_seconds = message["hang_seconds"]
            self.monitor.timeout_seconds = message["timeout_seconds"]
            self.membership.register(number, message["about"], message["facts"], message["session"], message["fits"])
        elif self._workers.get(number) is not peer:  # before hello, or after the script has connected again
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
        elif kind == "unfit":
            self.membership.workers[number].unfit = True
        elif kind == "store" and self._is_now(number, message["generation"]):
            self._key_values.handle(number, message)

    def _is_now(self, number: int, generation: int) -> bool:
        return self.membership.rank_of(number) is not None and generation == self.membership.generation

    def _agent(self, peer: Peer) -> Agent | None:
        return next((agent for agent in self._agents.values() if agent.peer is peer), None)

    def _handle_agent(self, agent: Agent, message: Message) -> None:
        """Handle an agent's report about workers that it has started, or a line of output."""
        if message["type"] == "output":
            self._show(message["stream"], message["line"])
            return
        number = message["worker"]
        if message["type"] == "started" and number // BLOCK == agent.number:
            agent.running.add(number)
            self.membership.started(number)
        elif message["type"] == "ended" and number in agent.running:
            agent.running.remove(number)
            if number in self._workers:  # its last messages may arrive after those of its agent
                agent.exits[number] = message
            else:
                self._handle_exit(message)
        else:
            self._connections.refuse(agent.peer, f"worker {number} is not on its machine")

    def disconnected(self, peer: Peer) -> None:
        number = peer.worker
        if number is not None and self._workers.get(number) is peer:
            del self._workers[number]
            machine = self._agents.get(number // BLOCK)
            if machine is not None and number in machine.exits:
                self._handle_exit(machine.exits.pop(number))
            elif number >= BLOCK and not (self.membership.workers[number].ending and self._reports_exit(number)):
                self._cut_off(number)
        if agent := self._agent(peer):
            del self._agents[agent.number]
            self._record("agent-left", agent=agent.number)
            for number in [one for one in self.membership.workers if one // BLOCK == agent.number]:
                if number not in self._workers:
                    self._cut_off(number)
            self._count_machines()

    def _reports_exit(self, number: int) -> bool:
        """Return whether the agent of its machine will report the exit code of a worker whose script has ended."""
        return number // BLOCK in self._agents

    def _cut_off(self, number: int) -> None:
        """Drop a worker of another machine that cannot be reached. Its process may still run."""
        self.membership.fenced = True
        self.membership.lose(number, f"{self.membership.name(number)} cannot be reached", self._clock())

    def _check_reported_exits(self, ended: list[int], now: float) -> None:
        """Verify a worker's report that others have ended. The kernel of this machine knows before their agent does."""
        for number in ended:
            worker = self.membership.workers.get(number)
            if worker is None or worker.ending or number >= BLOCK or not worker.about:
                continue
            if self._is_ending(worker.about["pid"]):
                self.membership.lose(number, f"{self.membership.name(number)} ended", now, confirmed=False)

    def _handle_exit(self, message: Message) -> None:
        """Handle the end of a worker's process on another machine, as its agent reports."""
        number = message["worker"]
        self.monitor.exits.append(
            WorkerExit(number, message["code"], time.time(), False, out_of_memory=message["out_of_memory"])
        )
        self.ended(number, message["code"], message["report"], lambda: None)  # its agent replaces it

    def _register_agent(self, peer: Peer, message: Message) -> None:
        """Admit the agent of another machine if it starts the same run, otherwise refuse it."""
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
        """Wait at most 60 seconds until the end of the run, if it has ended, is sent to all agents."""
        deadline = time.monotonic() + _AGENTS_SECONDS
        while time.monotonic() < deadline:
            with self._lock:
                if self.over is None or all(agent.end_sent for agent in self._agents.values()):
                    return
            time.sleep(TICK_SECONDS / 5)

    def _send_end_to_agents(self) -> None:
        """Send the end of the run to all agents that have not been notified."""
        untold = [agent for agent in self._agents.values() if not agent.end_sent]
        for agent in untold:
            agent.end_sent = True
        self._connections.send([agent.peer for agent in untold], {"type": "end", **(self.membership.over or {})})

    def name(self, number: int) -> str:
        """Return a name made of a worker's rank, process and machine."""
        with self._lock:
            return self.membership.name(number)

    def tick(self, now: float) -> None:
        """Advance the membership and check for late workers, or notify agents if the run has ended."""
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
