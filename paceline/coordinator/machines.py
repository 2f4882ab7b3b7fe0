"""Several machines: where they meet, who holds the roster, and how the others take part.

Each machine runs the same command. The one that has the address of ``--rendezvous`` holds the roster; the agents of
the others come to it, now or later, and start their workers. When the roster's machine is gone, nobody knows any more
who trains: the other agents end their workers and wait until it is back.
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
    """Where the machines of a run meet; ``address`` is what the name stands for."""

    name: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.name}:{self.port}"


def rendezvous(text: str) -> Rendezvous:
    """``host:port`` as an address.

    Raises:
        ConfigError: it is no such pair.
        StartError: the name stands for no address.
    """
    name, _, port = text.rpartition(":")
    if not name or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"--rendezvous {text}: give the name and a port of the first machine, as in node1:29500.")
    try:
        found = socket.getaddrinfo(name, int(port), socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise StartError(
            f"--rendezvous {text}: the name {name!r} stands for no address ({error.strerror}). Look for a misspelling, "
            f"or give the address itself; `getent hosts {name}` shows what this machine knows."
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


def claim(where: Rendezvous) -> socket.socket | None:
    """The socket of the roster, if this is the machine that holds it and no other run of the command here does."""
    if not is_here(where.address):
        return None
    try:
        return listen((where.address, where.port))
    except StartError:
        return None


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an address; none if it cannot be found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


class Guest:
    """The agent of another machine, at the roster's.

    Attributes:
        first: the number of its first worker.
        name: of the run.
        over: how the run ended, if it has: ``code`` and ``reason``.
        broken: whether the connection has ended.
    """

    def __init__(self, connection: socket.socket, told: Message) -> None:
        self._connection = connection
        self._reader = MessageReader()
        self.first = int(told["first"])
        self.name = str(told["name"])
        self.resume: str | None = told["resume"]
        self.address = str(connection.getsockname()[0])
        self.over: Message | None = None
        self.broken = False
        connection.setblocking(False)

    def tell(self, message: Message) -> None:
        """Tell the roster."""
        write(self._connection, message)

    def hear(self) -> None:
        """Take in what the roster has said since."""
        try:
            while data := self._connection.recv(1 << 16):
                for message in self._reader.feed(data):
                    if message["type"] == "end":
                        self.over = message
            self.broken = True
        except BlockingIOError:
            return
        except OSError:
            self.broken = True

    def await_end(self) -> None:
        """Until the roster has said how the run ended, is gone, or says nothing; the workers of this machine ended."""
        deadline = time.monotonic() + _END_SECONDS
        while self.over is None and not self.broken and time.monotonic() < deadline:
            self.hear()
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


def visit(where: Rendezvous, workers: int, seconds: float) -> Guest:
    """Come to the roster of another machine, which may yet have to start.

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
            return Guest(connection, _introduced(connection, workers))
        except (OSError, ValueError, KeyError):
            connection.close()
            raise StartError(
                f"At {where} answers another program than a Paceline run. Choose another port, or end that program."
            ) from None
    raise StartError(
        f"{socket.gethostname()} could not reach the run at {where} in {seconds:.0f} s: {reason}. Is paceline run "
        f"started on {where.name} with this --rendezvous, and does a firewall let port {where.port} through?"
    )


def _introduced(connection: socket.socket, workers: int) -> Message:
    connection.settimeout(_ANSWER_SECONDS)
    write(connection, {"type": "agent", "workers": workers, "host": socket.gethostname()})
    reader = MessageReader()
    told = None
    while told is None:
        data = connection.recv(1 << 16)
        if not data:
            raise ValueError("no answer")
        told = next(reader.feed(data), None)
    if told["type"] != "run":
        raise ValueError("another answer")
    return told
