"""Connections to the roster: messages are JSON objects, one a line."""

from __future__ import annotations

import json
import os
import socket

from paceline.comm.rendezvous.coordinator_client import make_watchful
from paceline.coordinator.membership import Message
from paceline.errors import StartError


class Peer:
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.worker: int | None = None
        self.agent: int | None = None
        self.workers = 0
        self.local = True
        self.told = False
        self._open = b""

    def take(self, data: bytes) -> list[bytes]:
        *lines, self._open = (self._open + data).split(b"\n")
        return lines


def listen(address: tuple[str, int]) -> socket.socket:
    """A socket on which a roster can listen; port 0 for a free one.

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
        connection.sendall(json.dumps(message).encode() + b"\n")
    except (OSError, TimeoutError):
        return


def connect(address: tuple[str, int], seconds: float) -> socket.socket:
    """A connection to a roster, which ends when the other machine is silent for long.

    Raises:
        OSError: nobody answers there.
    """
    connection = socket.create_connection(address, timeout=seconds)
    make_watchful(connection)
    return connection
