"""Connections to the coordinator: messages are JSON objects, one a line."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator

from paceline.coordinator.types import Message
from paceline.errors import StartError


class MessageReader:
    """Cuts the bytes that come over a connection into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that these bytes complete.

        Raises:
            ValueError: a line is not JSON.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line)


def encode(message: Message) -> bytes:
    """Write a message as it goes over a connection."""
    return json.dumps(message).encode() + b"\n"


def keep_alive(connection: socket.socket) -> None:
    """Send small messages at once, and end the connection when the other machine is silent for long."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_USER_TIMEOUT", 30_000), ("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Peer:
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.worker: int | None = None
        self.agent: int | None = None
        self.workers = 0
        self.local = True
        self.end_sent = False
        self.reader = MessageReader()


def listen(address: tuple[str, int]) -> socket.socket:
    """Open a socket on which a coordinator can listen; port 0 for a free one.

    Raises:
        StartError: the port is in use.
    """
    try:
        return socket.create_server(address, backlog=64)
    except OSError as error:
        host, port = address
        why = os.strerror(error.errno or 0)
        raise StartError(
            f"Port {port} on {host} cannot be used: {why}. Choose another one, or leave it out to get a free one."
        ) from None


def write(connection: socket.socket, message: Message) -> None:
    """Send a message; a connection that has ended is noticed where it is read."""
    try:
        connection.sendall(encode(message))
    except (OSError, TimeoutError):
        return


def connect(address: tuple[str, int], seconds: float) -> socket.socket:
    """Connect to a coordinator; the connection ends when the other machine is silent for long.

    Raises:
        OSError: nobody answers there.
    """
    connection = socket.create_connection(address, timeout=seconds)
    keep_alive(connection)
    return connection
