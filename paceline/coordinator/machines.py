"""Several machines: where they meet, which one holds the coordinator, and how the others join.

Each machine runs the same command. The one that has the address of ``--rendezvous`` holds the coordinator; the agents
of the others connect to it, now or later, and start their workers. When the coordinator's machine is gone, nobody knows
any more who trains: the other agents end their workers and wait until it is back.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import time
from dataclasses import dataclass

from paceline.coordinator.messages import MessageReader, connect, listen, write
from paceline.coordinator.types import Message
from paceline.errors import ConfigError, StartError

_TRY_SECONDS = 1.0
_ANSWER_SECONDS = 10.0
_END_SECONDS = 60.0
_LOOK_SECONDS = 0.05
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Rendezvous:
    """Where the machines of a run meet; ``address`` is that of the name."""

    name: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.name}:{self.port}"


def parse_rendezvous(text: str) -> Rendezvous:
    """Resolve ``host:port``.

    Raises:
        ConfigError: it is no such pair.
        StartError: the name has no address.
    """
    name, _, port = text.rpartition(":")
    if not name or not port.isdecimal() or len(port) > 5 or not 1 <= int(port) <= 65535:
        raise ConfigError(f"--rendezvous {text}: give the name and a port of the first machine, as in node1:29500.")
    try:
        found = socket.getaddrinfo(name, int(port), socket.AF_INET, socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:  # the latter: a name that cannot be one
        why = getattr(error, "strerror", None) or error
        raise StartError(
            f"--rendezvous {text}: the name {name!r} has no address ({why}). Check the spelling, or give "
            f"the address itself; `getent hosts {name}` shows what this machine knows."
        ) from None
    return Rendezvous(name, str(found[0][4][0]), int(port))


def is_here(address: str) -> bool:
    """Whether this machine has an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def listen_if_here(where: Rendezvous) -> socket.socket | None:
    """Open the coordinator's socket if this is its machine and no other process has it; else None."""
    if not is_here(where.address):
        return None
    try:
        return listen((where.address, where.port))
    except StartError:
        return None


def interface_of(address: str) -> str | None:
    """Find the network interface that has an address; None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


class AgentClient:
    """The connection of another machine's agent to the coordinator.

    Attributes:
        first: the number of its first worker.
        name: of the run.
        resume: the checkpoint to start from.
        address: of this machine, as the coordinator reaches it.
        over: how the run ended, if it has: ``code`` and ``reason``.
        not_joined: whether a worker of this machine has failed before it took part.
        broken: whether the connection has ended.
    """

    def __init__(self, connection: socket.socket, run_info: Message) -> None:
        self._connection = connection
        self._reader = MessageReader()
        self.first = int(run_info["first"])
        self.name = str(run_info["name"])
        self.resume: str | None = run_info["resume"]
        self.address = str(connection.getsockname()[0])
        self.over: Message | None = None
        self.not_joined = False
        self.broken = False
        connection.setblocking(False)

    def send(self, message: Message) -> None:
        """Send a message to the coordinator."""
        write(self._connection, message)

    def receive(self) -> None:
        """Take the messages that have come since."""
        try:
            while data := self._connection.recv(1 << 16):
                for message in self._reader.feed(data):
                    if message["type"] == "end":
                        self.over = message
                    elif message["type"] == "not-joined":
                        self.not_joined = True
            self.broken = True
        except BlockingIOError:
            return
        except OSError:
            self.broken = True

    def await_end(self) -> None:
        """Wait until the coordinator has said how the run ended, is gone, or stays silent."""
        deadline = time.monotonic() + _END_SECONDS
        while self.over is None and not self.broken and time.monotonic() < deadline:
            self.receive()
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


def join(where: Rendezvous, workers: int, seconds: float) -> AgentClient:
    """Connect to the coordinator of another machine, which may yet have to start.

    Raises:
        StartError: nobody answers there in time.
    """
    deadline = time.monotonic() + seconds
    reason = "no answer"
    while time.monotonic() < deadline:
        try:
            connection = connect((where.address, where.port), min(_ANSWER_SECONDS, seconds))
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(min(_TRY_SECONDS, max(0.0, deadline - time.monotonic())))
            continue
        try:
            return AgentClient(connection, _register(connection, workers))
        except (OSError, ValueError, KeyError):
            connection.close()
            raise StartError(
                f"What answers at {where} is not a Paceline run. Choose another port, or stop that program."
            ) from None
    raise StartError(
        f"{socket.gethostname()} could not reach the run at {where} in {seconds:.0f} s: {reason}. Is paceline run "
        f"started on {where.name} with this --rendezvous, and does a firewall let port {where.port} through?"
    )


def _register(connection: socket.socket, workers: int) -> Message:
    connection.settimeout(_ANSWER_SECONDS)
    write(connection, {"type": "agent", "workers": workers, "host": socket.gethostname()})
    reader, answer = MessageReader(), None
    while answer is None:
        data = connection.recv(1 << 16)
        if not data:
            raise ValueError("no answer")
        answer = next(reader.feed(data), None)
    if answer["type"] != "run":
        raise ValueError("another answer")
    return answer
