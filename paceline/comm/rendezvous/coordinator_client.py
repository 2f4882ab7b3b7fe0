"""A worker's connection to the coordinator: sends heartbeats and receives membership changes.

A thread serves the connection, so a worker whose main thread computes or blocks for a long time still receives
membership changes and still sends heartbeats. Each end first proves that it belongs to the run.
"""

from __future__ import annotations

import queue
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from paceline.comm.rendezvous.coordinator_store import CoordinatorStore
from paceline.coordinator import member_list
from paceline.coordinator.types import Departure, Generation, Member, Message
from paceline.coordinator.wire.authentication import NotAuthenticated, Refused, worker
from paceline.coordinator.wire.clock import ClockMeter
from paceline.coordinator.wire.messages import Connection, connect, decode, encode
from paceline.errors import PREEMPTED, StartError, WorkerLost
from paceline.system.user_code import user_line

_HEARTBEAT_SECONDS = 1.0
_AGAIN_SECONDS = 0.5
_MAIN = threading.main_thread()


class Link(Protocol):
    """Message channel between a client and the coordinator, which also triggers a heartbeat every second.

    Attributes:
        address: address at which other workers reach this machine.
    """

    @property
    def address(self) -> str: ...

    def start(self, client: CoordinatorClient) -> None:
        """Begin to call the client: ``receive`` per message, ``send_heartbeat`` every second, ``lose`` at the end."""

    def send(self, message: Message) -> None:
        """Send a message without blocking."""

    def put(self, message: Message) -> None:
        """Queue a message for :meth:`get`."""

    def get(self) -> Message:
        """Wait for the next queued message."""


class CoordinatorClient:
    """Client of the coordinator in a worker.

    Args:
        session: number of calls of ``paceline.start`` in the script.
        mark: records events. Defaults to none, and then the clocks are not compared.
    """

    def __init__(
        self, link: Link, number: int, seconds: float, session: int = 1, mark: Callable[..., None] | None = None
    ) -> None:
        self.number, self._session, self._seconds = number, session, seconds
        self.generation = -1  # number of the generation in which this worker is. -1 before the first.
        self._members: tuple[Member, ...] = ()
        self.pending = -1  # newest generation that has been announced
        # newest announced generation that forms because a worker was lost. Above ``generation``, waits must end.
        self.alarm = -1
        self._lost: dict[int, frozenset[int]] = {}
        self.broken = False  # whether the connection to the coordinator is lost
        self.on_alarm: Callable[[], None] = lambda: None
        self.on_change: Callable[[int], None] = lambda generation: None
        self._on_answer: Callable[[Message], None] = lambda answer: None
        self._status: Callable[[], dict[str, Any]] = dict
        self._link = link
        self.clock = None if mark is None else ClockMeter(number, link.send, mark)
        link.start(self)

    @property
    def address(self) -> str:
        """Address at which other workers reach this machine."""
        return self._link.address

    @property
    def missing(self) -> frozenset[int]:
        """Numbers of the workers that are known not to be in the next generation."""
        generation = self.generation
        return frozenset().union(*(lost for announced, lost in list(self._lost.items()) if announced > generation))

    def register(
        self, about: dict[str, Any], facts: dict[str, Any], hang_seconds: float | None, fits: Sequence[int]
    ) -> None:
        """Report that the model is built, with this worker's description and the numbers of workers it supports."""
        self._link.send(
            {
                "type": "hello",
                "about": about,
                "facts": facts,
                "hang_seconds": hang_seconds,
                "timeout_seconds": self._seconds,
                "fits": fits,
                "session": self._session,
            }
        )

    def await_membership(
        self,
        progress: tuple[int, ...] | None,
        arena: tuple[int, str] | None,
        leaving: bool = False,
        planned: bool = False,
        ended: Sequence[int] = (),
    ) -> Generation | Departure:
        """Report that this worker is ready for the next generation and wait until it forms."""
        self._link.send(
            {
                "type": "ready",
                "progress": progress,
                "arena": arena,
                "leaving": leaving,
                "planned": planned,
                "ended": list(ended),
            }
        )
        while True:
            message = self._link.get()
            kind = message["type"]
            if kind == "membership" and message["generation"] > self.generation:
                return self._enter(message)
            if kind == "end":
                saves = message["save"] and message.get("saver") == self.number
                return Departure(message["code"], message["reason"], saves)
            if kind == "dismissed":
                return Departure(PREEMPTED, "preempted; the others continue")
            if kind == "refused":
                raise StartError(
                    f"This worker does not match the run that it joins: {message['key']} is {message['here']} here "
                    f"and {message['there']} there."
                )
            if kind == "broken":
                raise WorkerLost(f"Worker {self.number} lost its connection to the coordinator, in the launcher.")

    def _enter(self, message: Message) -> Generation:
        self._members = member_list.read(self._members, message["members"])
        generation = Generation(
            number=message["generation"],
            members=self._members,
            joined=tuple(message["joined"]),
            lost=tuple(message["lost"]),
            fenced=message["fenced"],
            fresh=message["fresh"],
        )
        self.generation = generation.number
        return generation

    def open_store(self) -> CoordinatorStore:
        """Open the store of this generation. Answers no longer reach the store of the previous generation."""
        store = CoordinatorStore(self._link.send, self.generation, self._seconds)
        self._on_answer = store.answer
        return store

    def report(self, status: Callable[[], dict[str, Any]]) -> None:
        """Send the result of ``status`` with every heartbeat. No heartbeat is sent while the result is empty."""
        self._status = status

    def end_script(self) -> None:
        """Report that the script has ended, so the end of this process is not a loss. Its exit code is the result."""
        self._link.send({"type": "ending"})

    def report_unfit(self) -> None:
        """Report that this worker cannot take part, so that its end, with any exit code, does not end the run."""
        self._link.send({"type": "unfit"})

    def send_heartbeat(self) -> None:
        """Send this worker's status, with the current line of the user's script, unless the status is empty."""
        if status := self._status():
            line = user_line(sys._current_frames().get(_MAIN.ident or 0))
            self._link.send({"type": "heartbeat", "status": {**status, "line": line}})

    def receive(self, message: Message) -> None:
        if message["type"] == "change":
            self.pending = max(self.pending, message["generation"])
            self._lost[message["generation"]] = frozenset(message.get("lost", ()))
            self.on_change(message["generation"])
            if message["urgent"]:
                self.alarm = max(self.alarm, message["generation"])
                self.on_alarm()
        elif message["type"] == "store":
            self._on_answer(message)
        elif message["type"] == "clock" and self.clock is not None:
            self.clock.receive(message)
        else:
            self._link.put(message)

    def lose(self) -> None:
        """Record that the connection to the coordinator is lost and raise the alarm."""
        if not self.broken:
            self.broken = True
            self.pending = self.alarm = sys.maxsize
            self._link.put({"type": "broken"})
            self.on_alarm()


class SocketLink:
    """Link over a TCP socket, served by a thread.

    Raises:
        StartError: the coordinator cannot be reached or belongs to another run.
    """

    def __init__(self, address: str, number: int, key: bytes, seconds: float) -> None:
        self._connection = _connect(address, number, key, seconds)
        self.address = str(self._connection.socket.getsockname()[0])
        self._kept: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.put, self.get = self._kept.put, self._kept.get
        self._lock = threading.Lock()

    def start(self, client: CoordinatorClient) -> None:
        name = "paceline-coordinator-client"
        threading.Thread(target=self._listen, args=(client,), name=name, daemon=True).start()

    def send(self, message: Message) -> None:
        """Send as much of a message as the socket takes without blocking. The thread sends the rest."""
        line = encode(message)
        with self._lock:
            self._connection.send(line)

    def _listen(self, client: CoordinatorClient) -> None:
        sent = 0.0
        poll = select.poll()
        while not self._connection.broken:
            due = sent + _HEARTBEAT_SECONDS - time.monotonic()
            if due <= 0:
                sent, due = time.monotonic(), _HEARTBEAT_SECONDS
                client.send_heartbeat()
                if client.clock is not None:
                    client.clock.ask()
            poll.register(self._connection.socket, select.POLLIN | (select.POLLOUT if self._connection.unsent else 0))
            if not poll.poll(1000 * due):
                continue
            with self._lock:
                self._connection.flush()
            try:
                for line in self._connection.receive():
                    client.receive(decode(line))
            except (ValueError, KeyError, TypeError):  # the peer is authenticated, so the coordinator is broken
                break
        client.lose()


def _connect(address: str, number: int, key: bytes, seconds: float) -> Connection:
    """Connect to the coordinator. Retry after it resets the connection, as it does if authentication is too slow."""
    deadline = time.monotonic() + seconds
    host, _, port = address.rpartition(":")
    while True:
        try:
            left = max(1.0, deadline - time.monotonic())
            return connect((host, int(port)), worker(number), key, left)
        except Refused:
            reason = "it is that of another run"
        except NotAuthenticated as error:
            reason = str(error)
        except ConnectionResetError as error:
            if time.monotonic() < deadline:
                time.sleep(_AGAIN_SECONDS)
                continue
            reason = str(error)
        except OSError as error:
            reason = str(error)
        raise StartError(f"Worker {number} could not reach the launcher at {address}: {reason}.")
