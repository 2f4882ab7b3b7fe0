"""Message connections to the coordinator: JSON objects, one per line.

Neither end blocks the other: unsent data is buffered, and a peer that does not read loses the connection.
"""

from __future__ import annotations

import json
import os
import socket

from paceline.coordinator.types import Message
from paceline.coordinator.wire.authentication import authenticate
from paceline.errors import StartError

LONGEST_MESSAGE = 1 << 24
"""Largest message in bytes. Facts of a worker take about 100 bytes per parameter, memberships 200 per worker."""
_MOST_UNSENT = 2 * LONGEST_MESSAGE
_READ = 1 << 16


class Connection:
    """Non-blocking end of a connection.

    Attributes:
        longest: largest length of a received line, in bytes.
        broken: whether the connection has ended, or too much data is unsent because the other end does not read.
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
        """Whether data is waiting to be sent."""
        return bool(self._unsent) and not self.broken

    def send(self, line: bytes) -> None:
        """Append a line to the send buffer, and send what is possible without blocking."""
        if len(self._unsent) + len(line) > _MOST_UNSENT:
            self.broken = True
        if not self.broken:
            self._unsent += line
            self.flush()

    def flush(self) -> None:
        """Send buffered data, as much as possible without blocking."""
        try:
            while self._unsent and not self.broken:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self.broken = True

    def receive(self) -> list[bytes]:
        """Return the complete lines that have arrived. Sets ``broken`` when the connection has ended.

        Raises:
            ValueError: a line is longer than ``longest``.
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
        self.broken = self.closed = True
        self.socket.close()


def encode(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Decode a line. Raises ValueError if the line is not a JSON object with a ``type``."""
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
    """Configure a socket to send small messages at once, and to fail if the other machine is silent for 30 seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_USER_TIMEOUT", 30_000), ("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen(address: tuple[str, int]) -> socket.socket:
    """Open a listening socket. Port 0 selects a free port."""
    try:
        return socket.create_server(address, backlog=1024)
    except OSError as error:
        host, port = address
        why = os.strerror(error.errno or 0)
        raise StartError(
            f"Port {port} on {host} cannot be used: {why}. Choose another one, or leave it out to get a free one."
        ) from None


def connect(address: tuple[str, int], role: str, key: bytes, seconds: float) -> Connection:
    """Connect and authenticate to a coordinator.

    Args:
        seconds: timeout in seconds for the connection, and again for the authentication.

    Raises:
        NotAuthenticated: the other end is not the coordinator of this run, or does not accept the key.
        OSError: the coordinator cannot be reached.
    """
    return Connection(open_socket(address, role, key, seconds))


def open_socket(address: tuple[str, int], role: str, key: bytes, seconds: float) -> socket.socket:
    """Connect and authenticate, and return the socket. Arguments and errors are those of :func:`connect`."""
    connection = socket.create_connection(address, timeout=seconds)
    try:
        keep_alive(connection)
        authenticate(connection, role, key, seconds)
        return connection
    except BaseException:
        connection.close()
        raise
