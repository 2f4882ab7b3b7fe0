"""The coordinator: the one place that knows who trains. A thread of the first launcher, so that it survives any worker.

Workers and the agents of other machines keep a connection to it and send messages, one JSON object a line. A connection
that ends proves nothing about a worker of the coordinator's own machine, where the agent sees the process end; of a
worker elsewhere it is the evidence.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paceline.coordinator.hang_detection import WorkerStatus
from paceline.coordinator.lateness import LatenessPolicy
from paceline.coordinator.membership import MembershipProtocol
from paceline.coordinator.messages import Peer, keep_alive, write
from paceline.coordinator.monitor import RunMonitor
from paceline.coordinator.types import Bounds, Message
from paceline.errors import PREEMPTED
from paceline.failure.coordinator_report import CoordinatorReport
from paceline.failure.worker_report import describe_exit
from paceline.launch.base import WorkerExit
from paceline.launch.kernel import is_ending

_TICK_SECONDS = 0.5
_SEND_SECONDS = 0.5
_AGENTS_SECONDS = 60.0
BLOCK = 1000
"""Each agent numbers its workers within a range of this size."""


class Coordinator:
    """Receives what workers and agents report, and lets :class:`MembershipProtocol` decide.

    Args:
        listener: see :func:`paceline.coordinator.messages.listen`.
        bounds: how many workers there must and may be.
        record: called with each event.
        run_info: what an agent of another machine must know of the run.
        local_workers: how many start on this machine.
    """

    def __init__(
        self,
        listener: socket.socket,
        bounds: Bounds,
        record: Callable[..., None],
        run_info: Message | None = None,
        local_workers: int = 0,
    ) -> None:
        self._lock = threading.RLock()
        self._record = record
        self._run_info = run_info
        self._connections: dict[int, socket.socket] = {}
        self._agents: dict[int, Peer] = {}
        self.monitor = RunMonitor(record)
        self.membership = MembershipProtocol(bounds, self._send, self._record_change)
        self._lateness = LatenessPolicy(self.membership, self.monitor)
        self._listener = listener
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._local_workers = local_workers
        self._agents_seen = 0
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="paceline-coordinator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections."""
        self._closed = True
        self._thread.join(2 * _TICK_SECONDS + 1)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

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
            now, membership = time.monotonic(), self.membership
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
        now = time.monotonic()
        if not self.membership.needs(number):
            self._record("not-joined", worker=number, reason=reason)
            if agent := self._agents.get(number // BLOCK):
                write(agent.connection, {"type": "not-joined"})
            self.membership.lose(number, reason, now)
            return False
        if report:
            self.monitor.reports[number] = report
        self.membership.end(code, reason, now, save=True)
        return True

    def report(self, elastic: bool) -> CoordinatorReport:
        """Report how the run ended."""
        with self._lock:
            return self.monitor.report(self.membership, self._lateness.statuses(time.monotonic()), elastic)

    @property
    def members(self) -> list[int]:
        """The workers in the order of their ranks."""
        return list(self.membership.members)

    def preempt(self) -> None:
        """End the run if other machines take part: this one goes away, and the coordinator with it."""
        with self._lock:
            if self._agents:
                self.membership.end(PREEMPTED, "preempted", time.monotonic(), save=True)

    @property
    def waiting(self) -> bool:
        """Whether the next generation has yet to form."""
        return self.membership.changing or self.membership.generation < 0

    @property
    def over(self) -> Message | None:
        """How the run ended, if it has."""
        return self.membership.over

    def _serve(self) -> None:
        try:
            self._serve_until_closed()
        finally:
            if not self._closed:  # after a bug here the workers must not wait for ever
                for key in list(self._selector.get_map().values()):
                    key.fileobj.close()  # type: ignore[union-attr]

    def _serve_until_closed(self) -> None:
        ticked = time.monotonic()
        while not self._closed:
            for key, _ in self._selector.select(_TICK_SECONDS):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            if time.monotonic() - ticked > _TICK_SECONDS:
                ticked = time.monotonic()
                self._tick(ticked)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone again, or too many files are open
            return
        connection.settimeout(_SEND_SECONDS)
        keep_alive(connection)
        self._selector.register(connection, selectors.EVENT_READ, Peer(connection))

    def _read(self, peer: Peer) -> None:
        try:
            data = peer.connection.recv(1 << 16)
        except (OSError, TimeoutError):
            data = b""
        if not data:
            self._disconnect(peer)
            return
        try:
            for message in peer.reader.feed(data):
                with self._lock:
                    self._handle(peer, message)
        except (ValueError, KeyError, TypeError):
            self._disconnect(peer)  # not one of ours

    def _disconnect(self, peer: Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        with self._lock:
            if peer.worker is not None and self._connections.get(peer.worker) is peer.connection:
                del self._connections[peer.worker]
                if not peer.local and not self.membership.workers[peer.worker].ending:
                    self._cut_off(peer.worker)
            if peer.agent is not None:
                self._agents.pop(peer.agent, None)
                self._record("agent-left", agent=peer.agent)
                for number in [one for one in self.membership.workers if one // BLOCK == peer.agent]:
                    if number not in self._connections:
                        self._cut_off(number)
                self._count_machines()

    def _cut_off(self, number: int) -> None:
        """Lose a worker of another machine: nobody can say any more how it is."""
        self.membership.lose(number, f"{self.membership.name(number)} cannot be reached", time.monotonic())

    def _handle(self, peer: Peer, message: Message) -> None:
        kind, now = message["type"], time.monotonic()
        if kind == "hello":
            peer.worker, peer.local = message["worker"], message.get("local", True)
            self._connections[peer.worker] = peer.connection
            self.monitor.hang_seconds = message.get("hang_seconds")
            self.monitor.timeout_seconds = message.get("timeout_seconds")
            self.membership.register(
                peer.worker, message["about"], message["facts"], message["session"], message["fits"]
            )
        elif kind == "ready" and peer.worker is not None:
            progress = message["progress"]
            self._lateness.forget(peer.worker)
            self.membership.workers[peer.worker].about["arena"] = message["arena"]
            self._check_reported_exits(message["ended"], now)
            self.membership.ready(
                peer.worker,
                tuple(progress) if progress else None,
                now,
                leaving=message["leaving"],
                planned=message["planned"],
            )
        elif kind == "heartbeat" and peer.worker is not None and self._connections.get(peer.worker) is peer.connection:
            self._lateness.heartbeat(peer.worker, WorkerStatus(rank=-1, **message["status"]))
        elif kind == "ending" and peer.worker is not None:
            self.membership.workers[peer.worker].ending = True
        elif kind == "agent":
            self._register_agent(peer, message)
        elif kind == "started":
            self.membership.started(message["worker"])
        elif kind == "ended":
            self._handle_exit(message)

    def _check_reported_exits(self, ended: list[int], now: float) -> None:
        """Check a worker's word that others have ended; on this machine that shows before their agent sees it."""
        for number in ended:
            worker = self.membership.workers.get(number)
            if worker is None or worker.ending or number >= BLOCK or not worker.about:
                continue
            if is_ending(worker.about["pid"]):
                self.membership.lose(number, f"{self.membership.name(number)} ended", now, confirmed=False)

    def _handle_exit(self, message: Message) -> None:
        """Take note of how a worker of another machine ended, as its agent reports."""
        number = message["worker"]
        self.monitor.exits.append(
            WorkerExit(number, message["code"], time.time(), False, out_of_memory=message["out_of_memory"])
        )
        self.ended(number, message["code"], message["report"], lambda: None)  # its agent replaces it

    def _register_agent(self, peer: Peer, message: Message) -> None:
        peer.agent = self._agents_seen = self._agents_seen + 1
        peer.workers = message["workers"]
        self._agents[peer.agent] = peer
        write(peer.connection, {"type": "run", "first": peer.agent * BLOCK, **(self._run_info or {})})
        self._record("agent-joined", agent=peer.agent, host=message.get("host"))
        self._count_machines()

    def _count_machines(self) -> None:
        bounds = self.membership.bounds
        wanted = self._local_workers + sum(peer.workers for peer in self._agents.values())
        self.membership.resize(replace(bounds, wanted=max(bounds.least, min(bounds.most, wanted))), time.monotonic())

    def _send(self, number: int, message: Message) -> None:
        connection = self._connections.get(number)
        if connection is not None:
            write(connection, message)

    def wait_for_agents(self) -> None:
        """Wait until the other machines know that the run is over; a minute at most."""
        deadline = time.monotonic() + _AGENTS_SECONDS
        while time.monotonic() < deadline:
            with self._lock:
                if not self._agents or (self.over is not None and all(peer.end_sent for peer in self._agents.values())):
                    return
            time.sleep(_TICK_SECONDS / 5)

    def _send_end_to_agents(self) -> None:
        """Tell the agents of the other machines that the run is over."""
        for peer in self._agents.values():
            if not peer.end_sent:
                peer.end_sent = True
                write(peer.connection, {"type": "end", **(self.membership.over or {})})

    def name(self, number: int) -> str:
        """Name a worker by its rank, process and machine."""
        with self._lock:
            return self.membership.name(number)

    def _tick(self, now: float) -> None:
        with self._lock:
            self.membership.advance(now)
            if self.membership.over is not None:
                self._send_end_to_agents()
            else:
                self._lateness.check(now)

    def _record_change(self, event: str, **fields: Any) -> None:
        if event == "membership":
            self._lateness.reset()
        self.monitor.record(event, self._lateness.statuses(time.monotonic()), **fields)
