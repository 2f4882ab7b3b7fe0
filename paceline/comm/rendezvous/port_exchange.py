"""Exchange of rank 0's port between the processes of one machine, over a Unix socket named after their job.

The socket's name is abstract: it lies in no folder, vanishes with the process that bound it, and is local to a network
namespace, as loopback is. The kernel reports the user of the peer. Other users get no answer and are not trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import threading
import time

_POLL_SECONDS = 0.02
_ANSWER_SECONDS = 5.0
_PORT = struct.Struct("=H")
_CREDENTIALS = struct.Struct("=iII")


class PortServer:
    """Server that sends the port of rank 0 to processes of the same job and user until it is closed.

    Raises:
        OSError: the name of the socket is taken.
    """

    def __init__(self, job: str, port: int) -> None:
        self._answer = _PORT.pack(port)
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(_name(job))
            self._socket.listen(socket.SOMAXCONN)
        except OSError:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="paceline-port", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:  # closed
                return
            with peer, contextlib.suppress(OSError):
                if _user(peer) == os.getuid():
                    peer.sendall(self._answer)


def ask_port(job: str, seconds: float) -> int | None:
    """Ask rank 0 for its port. Return None if it has not answered within ``seconds``.

    Raises:
        PermissionError: another user answers.
    """
    deadline = time.monotonic() + seconds
    while (port := _ask(job)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return port


def _ask(job: str) -> int | None:
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(_ANSWER_SECONDS)
        try:
            asking.connect(_name(job))
        except OSError:  # rank 0 does not serve yet
            return None
        if (user := _user(asking)) != os.getuid():
            raise PermissionError(f"a process of user {user} answers in place of rank 0")
        try:
            answer = asking.recv(_PORT.size)
        except OSError:
            return None
    return int(_PORT.unpack(answer)[0]) if len(answer) == _PORT.size else None


def peer_process(descriptor: int) -> int | None:
    """Return the process that created an inherited socket pair, or None if the descriptor is not a socket."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as one:
            return _peer(one)[0]
    except OSError:
        return None


def _name(job: str) -> str:
    return f"\0paceline-{os.getuid()}-{hashlib.sha256(job.encode()).hexdigest()[:32]}"


def _user(other: socket.socket) -> int:
    return _peer(other)[1]


def _peer(other: socket.socket) -> tuple[int, int]:
    process, user, _ = _CREDENTIALS.unpack(other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return process, user
