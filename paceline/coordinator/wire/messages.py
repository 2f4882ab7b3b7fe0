"""Connections to the coordinator: messages are JSON objects, one a line.

No end ever blocks the other: what cannot be sent at once waits in a buffer, and who does not read loses the connection.
"""

from __future__ import annotations

import json
import os
import socket

from paceline.coordinator.types import Message
from paceline.coordinator.wire.authentication import authenticate
from paceline.errors import StartError

LONGEST_MESSAGE = 1 << 24
"""Bytes; the largest are the facts of a worker, about 100 for each parameter, and memberships, 200 for each worker."""
_MOST_UNSENT = 2 * LONGEST_MESSAGE
_READ = 1 << 16


class Connection:
    """One end of a connection, which never blocks.

    Attributes:
        socket: of the connection.
        longest: bytes that one line from the other end may have.
        broken: whether the connection has ended, or the other end does not read.
        closed: whether this end has let go of it.
    """

    def __init__(self, connection: socket.socket, longest: int = LONGEST_MESSAGE) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.longest = longest
        self.broken = self.closed = False
        self._received = bytearray()
        self._unsent = bytearray()

    @property
    def unsent(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._unsent) and not self.broken

    def send(self, line: bytes) -> None:
        """Send what can be sent at once of a line, or of what waits before it; see :meth:`flush`."""
        if len(self._unsent) + len(line) > _MOST_UNSENT:
            self.broken = True
        if not self.broken:
            self._unsent += line
            self.flush()

    def flush(self) -> None:
        """Send what can be sent now."""
        try:
            while self._unsent and not self.broken:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self.broken = True

    def receive(self) -> list[bytes]:
        """Take the lines that have come; a connection that ends is ``broken`` after its last one.

        Raises:
            ValueError: a line is too long.
        """
        try:
            data = self.socket.recv(_READ)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.broken = True
            return []
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._received) + lines[0]
            self._received.clear()
        self._received += rest
        if max(len(self._received), *map(len, lines), 0) > self.longest:
            raise ValueError(f"a line of more than {self.longest} bytes")
        return lines

    def close(self) -> None:
        """End the connection."""
        self.broken = self.closed = True
        self.socket.close()


def encode(message: Message) -> bytes:
    """Write a message as it goes over a connection."""
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Read a message.

    Raises:
        ValueError: it is not a JSON object with a type.
    """
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("brackets nested too deep") from None
    except ValueError:
        raise ValueError("not JSON") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ValueError("not a message")
    return message


def keep_alive(connection: socket.socket) -> None:
    """Send small messages at once, and end the connection when the other machine is silent for long."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_USER_TIMEOUT", 30_000), ("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen(address: tuple[str, int]) -> socket.socket:
    """Open a socket on which a coordinator can listen; port 0 for a free one.

    Raises:
        StartError: the port is in use.
    """
    try:
        return socket.create_server(address, backlog=1024)
    except OSError as error:
        host, port = address
        why = os.strerror(error.errno or 0)
        raise StartError(
            f"Port {port} on {host} cannot be used: {why}. Choose another one, or leave it out to get a free one."
        ) from None


def connect(address: tuple[str, int], role: str, key: bytes, seconds: float) -> Connection:
    """Connect to a coordinator; the connection ends when the other machine is silent for long.

    Args:
        address: of the coordinator.
        role: of this end, and ...
        key: its key (:mod:`paceline.coordinator.wire.authentication`).
        seconds: to wait at most.

    Raises:
        NotAuthenticated: it is not the coordinator of this run, or does not accept this key.
        OSError: nobody answers there.
    """
    connection = socket.create_connection(address, timeout=seconds)
    try:
        keep_alive(connection)
        authenticate(connection, role, key, seconds)
        return Connection(connection)
    except BaseException:
        connection.close()
        raise
