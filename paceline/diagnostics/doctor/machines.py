"""Protocol between machines: the first asks and the others answer, over the same connections as a run.

::

    machine h2                          h1, with the address of --rendezvous
    machine (its name)        ->
                              <-        ask clock / echo / facts / look / measure
    answer                    ->
                              <-        report (exit code)
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.coordinator.machines import Rendezvous
from paceline.coordinator.types import Message
from paceline.coordinator.wire.authentication import AGENT, NotAuthenticated, Refused, authenticate
from paceline.coordinator.wire.connections import Connections, Peer
from paceline.coordinator.wire.messages import Connection, decode, encode, keep_alive
from paceline.coordinator.wire.validation import DOCTOR_KINDS
from paceline.diagnostics.doctor.examine import Answer, Examiner, Wanted
from paceline.diagnostics.doctor.finding import Finding
from paceline.diagnostics.doctor.reach import attempt
from paceline.system.secret import Secret, Shared

_ANSWER_SECONDS = 150.0
"""Time limit for an answer: enough to load torch on a busy machine, or read the blocks of a data set."""
_SILENCE_SECONDS = 300.0
_TRY_SECONDS = 1.0


class GoneError(Exception):
    """Loss of a machine that no longer answers. The message says why."""


class Asked:
    """Machine that answers questions: this machine. ``address``: address by which the other machines know it."""

    def __init__(self, host: str, address: str, examiner: Examiner | None = None) -> None:
        self.host, self.address, self.name = host, address, host
        self._examiner = examiner
        self.answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()

    def start(self, question: str, **given: Any) -> None:
        """Ask a question. The machine starts to work on the answer."""
        assert self._examiner is not None
        examiner = self._examiner
        threading.Thread(
            target=lambda: self.answers.put(examiner.answer(question, given)), name="paceline-doctor", daemon=True
        ).start()

    def finish(self, what: str, seconds: float = _ANSWER_SECONDS) -> Answer:
        """Wait for the answer and return it."""
        try:
            answer = self.answers.get(timeout=seconds)
        except queue.Empty:
            raise GoneError(f"{self.name} did not answer within {seconds:.0f} s ({what})") from None
        if answer is None:
            self.answers.put(None)
            raise GoneError(f"the connection to {self.name} ended ({what})")
        return answer

    def end(self, code: int) -> None:
        """Do nothing, because this machine needs no notification of the end."""


class Remote(Asked):
    """Machine that answers questions over a connection: another machine."""

    def __init__(self, host: str, peer: Peer, connections: Connections, lock: threading.RLock) -> None:
        super().__init__(host, peer.host)
        self.peer, self._connections, self._lock = peer, connections, lock

    def start(self, question: str, **given: Any) -> None:
        self._send({"type": "ask", "question": question, "given": given})

    def end(self, code: int) -> None:
        """Send the report with the exit code, which ends the examination of the machine."""
        self._send({"type": "report", "code": code})

    def _send(self, message: Message) -> None:
        with self._lock:
            if not self.peer.connection.closed:
                self._connections.send([self.peer], message)


@dataclass
class Gathering:
    """Machines that have joined the first machine, and receiver of their messages."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    machines: list[Remote] = field(default_factory=list)
    connections: Connections | None = None
    came: threading.Condition = field(default_factory=threading.Condition)

    def open(self, listener: socket.socket, secret: Secret) -> None:
        self.connections = Connections(listener, secret.key, self, self.lock, lambda *_, **__: None, DOCTOR_KINDS)
        self.connections.start()

    def wait(self, count: int, seconds: float) -> list[Remote]:
        """Wait until ``count`` other machines have joined, for at most ``seconds``, and return the machines."""
        with self.came:
            self.came.wait_for(lambda: len(self.machines) >= count, seconds)
            return self.machines[:count]

    def close(self) -> None:
        """Close all connections after unsent data have been sent, within two seconds."""
        if self.connections is not None:
            deadline = time.monotonic() + 2.0
            while any(one.peer.connection.unsent for one in self.machines) and time.monotonic() < deadline:
                time.sleep(0.02)
            self.connections.close()

    def handle(self, peer: Peer, message: Message) -> None:
        machine = next((one for one in self.machines if one.peer is peer), None)
        if message["type"] == "machine" and machine is None:
            assert self.connections is not None
            with self.came:
                self.machines.append(Remote(message["host"], peer, self.connections, self.lock))
                self.came.notify()
        elif message["type"] == "answer" and machine is not None:
            machine.answers.put(message["value"])

    def disconnected(self, peer: Peer) -> None:
        for one in self.machines:
            if one.peer is peer:
                one.answers.put(None)

    def tick(self, now: float) -> None:
        """Do nothing, because no periodic work is needed."""


def name_all(machines: Sequence[Asked]) -> None:
    """Name each machine by its host name, with the address or a number if the host name is not unique."""
    hosts = [one.host for one in machines]
    for number, one in enumerate(machines):
        one.name = one.host
        if hosts.count(one.host) > 1:
            one.name = f"{one.host} ({one.address})"
        if any(other.name == one.name for other in machines[:number]):
            one.name += f" #{number}"


@dataclass(frozen=True)
class Joined:
    """Result of joining the first machine: the connection and the secret, or the problem."""

    connection: Connection | None = None
    secret: Secret | None = None
    problem: Finding | None = None


def join(where: Rendezvous, host: str, shared: Shared, seconds: float) -> Joined:
    """Connect to the first machine, which may not have started yet. Retry for ``seconds``, unless it refuses."""
    deadline = time.monotonic() + seconds
    while True:
        secret = shared.read()
        try:
            joined = (
                _try_to_join(where, host, secret)
                if secret
                else _without_secret(
                    f"there is no secret file {shared.file} here", f"copy it from {where.name}, with mode 0600"
                )
            )
        except Refused:  # a later try, when the first machine has given up, would find another problem
            return _without_secret(
                f"{where} does not accept the secret of this machine",
                "give both machines the same --secret-file (or PACELINE_SECRET)",
            )
        if joined.connection is not None or time.monotonic() >= deadline:
            return joined
        time.sleep(min(_TRY_SECONDS, max(0.0, deadline - time.monotonic())))


def _try_to_join(where: Rendezvous, host: str, secret: Secret) -> Joined:
    tried = attempt(where.address, where.port)
    if tried.socket is None:
        return Joined(problem=unreachable(where, tried.cause))
    try:
        keep_alive(tried.socket)
        authenticate(tried.socket, AGENT, secret.key(AGENT), 10.0)
    except Refused:
        tried.socket.close()
        raise
    except (NotAuthenticated, OSError) as error:
        tried.socket.close()
        return Joined(problem=unreachable(where, f"connected, and then {error}"))
    connection = Connection(tried.socket)
    connection.send(encode({"type": "machine", "host": host}))
    return Joined(connection, secret)


def unreachable(where: Rendezvous, cause: str) -> Finding:
    address = "" if where.name == where.address else f" ({where.address})"
    return Finding(
        "rendezvous port",
        "failure",
        f"port {where.port} of {where.name}{address} cannot be reached: {cause}",
        "Every machine of a run connects to this port of the first one.",
        f"start paceline doctor on {where.name} with the same --rendezvous; let TCP port {where.port} through its "
        f"firewall (nft list ruleset, iptables -L, the security group of the cloud); look whether {where.name} there "
        "resolves to this address, and not to 127.0.1.1",
    )


def _without_secret(values: str, cure: str) -> Joined:
    why = "Only a process that knows the secret of the run may take part."
    return Joined(problem=Finding("secret", "failure", values, why, cure))


def serve(connection: Connection, wanted: Wanted, secret: Secret) -> int | None:
    """Answer the first machine's questions until its report. Return its exit code, or None if the connection ended."""
    examiner = Examiner(wanted, str(connection.socket.getsockname()[0]), secret)
    until = time.monotonic() + _SILENCE_SECONDS
    try:
        while time.monotonic() < until and not connection.broken:
            select.select([connection.socket], [connection.socket] if connection.unsent else [], [], _TRY_SECONDS)
            connection.flush()
            for line in connection.receive():
                message = decode(line)
                if message["type"] == "report":
                    return int(message["code"])
                until = time.monotonic() + _SILENCE_SECONDS
                value = examiner.answer(message["question"], message["given"])
                connection.send(encode({"type": "answer", "value": value}))
        return None
    finally:
        examiner.close()
        with contextlib.suppress(OSError):
            connection.close()
