"""Messages between the launcher and the preloaded parent: length, JSON and open files."""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")
_MOST_BYTES, _MOST_FILES = 1 << 26, 3  # an environment has at most a few megabytes


def send(channel: socket.socket, message: dict[str, Any], files: tuple[int, ...] = ()) -> None:
    """Send a message with descriptors of open files.

    Raises:
        OSError: the other process has ended, or does not read.
    """
    data = json.dumps(message).encode()
    header = _LENGTH.pack(len(data))
    if files:
        socket.send_fds(channel, [header], files)
    else:
        channel.sendall(header)
    channel.sendall(data)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive a message and its files. Return None if the other process has ended."""
    header, files, _, _ = socket.recv_fds(channel, _LENGTH.size, _MOST_FILES)
    for opened in files:
        os.set_inheritable(opened, False)
    if not header:
        return None
    header += _exactly(channel, _LENGTH.size - len(header))
    (length,) = _LENGTH.unpack(header)
    if length > _MOST_BYTES:
        raise OSError(f"a message of {length} bytes")
    message = json.loads(_exactly(channel, length))
    if not isinstance(message, dict):
        raise OSError("a message that is not an object")
    return message, files


def _exactly(channel: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        if not (part := channel.recv(min(count - len(parts), 1 << 16))):
            raise OSError("a message that is cut off")
        parts += part
    return bytes(parts)
