"""Measurement of links between machines. Each machine listens on its own port, as workers do, and all connect.

::

    sender   connect ── 400 small messages, 16 in flight ──────> time of a round trip, share of packets sent again
             connect ── as much data as fits in a second ──────> bytes per second
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.coordinator.wire.authentication import AGENT, NotAuthenticated, admit, authenticate
from paceline.diagnostics.doctor.reach import attempt
from paceline.launchers.machine import number_in
from paceline.system.secret import Secret

_MESSAGES, _WINDOW, _MESSAGE = 400, 16, 64
_BURST_BYTES, _BURST_SECONDS = 64 << 20, 0.7
_CHUNK = 1 << 18
_PATIENCE = 5.0
_MESSAGES_SECONDS = 4.0
_POLL_SECONDS = 0.05
_FEW_REPEATS = 3
_MOST_STARVED = 4.0
_IP_MTU = 14
_SENT_AGAIN, _SENT, _ROUND_TRIP = 100, 136, 148
"""Offsets in the kernel's ``tcp_info`` of the retransmitted segments, all segments, and the minimum round trip (µs)."""
_ECHO, _TAKE = b"e", b"t"
_STARVED = Path("/proc/thread-self/schedstat")
_RESET = "connection refused, although a program listens on this port: a firewall resets it, or another machine answers"


@dataclass(frozen=True)
class Link:
    """Measurement of the link from one machine to another."""

    problem: str = ""  # reason why there is no measurement. Empty if there is one.
    # whether a firewall refused or dropped the connection, instead of a machine without a listener
    firewall: bool = False
    # shortest round trip in seconds as measured by the kernel, because a busy processor adds delays
    latency: float = 0.0
    loss: float = 0.0  # share of packets that were retransmitted while small messages were sent
    speed: float = 0.0  # bytes per second. 0 if small messages pass and large messages do not.
    mtu: int = 0  # MTU of the path in bytes


class Listener:
    """Listener of this machine for the measurements of others. It serves until it is closed.

    Args:
        address: address by which the other machines know this machine.
    """

    def __init__(self, address: str, secret: Secret) -> None:
        self._socket = socket.create_server((address, 0), backlog=128)
        self._secret = secret
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name="paceline-doctor", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="paceline-doctor", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, NotAuthenticated):
            admit(connection, self._secret.key, _PATIENCE)
            connection.settimeout(_PATIENCE)
            wanted = connection.recv(1)
            if wanted == _ECHO:
                while data := connection.recv(_CHUNK):
                    connection.sendall(data)
            elif wanted == _TAKE:
                connection.sendall(struct.pack("!Qdd", *_receive(connection)))
                while connection.recv(_CHUNK):
                    pass


def measure(address: str, port: int, secret: Secret) -> Link:
    """Measure the link to a machine that listens, and return the measurement or the problem."""
    try:
        with _connected(address, port, secret) as connection:
            latency, loss, mtu = _small_messages(connection)
    except _NoConnectionError as error:
        return Link(problem=str(error), firewall=error.firewall)
    except OSError as error:
        return Link(problem=f"the connection broke while small messages were sent: {error.strerror or error}")
    try:
        return Link("", False, latency, loss, _speed(address, port, secret), mtu)
    except (OSError, _NoConnectionError) as error:
        return Link(problem=f"the connection broke under load: {error}")


class _NoConnectionError(Exception):
    def __init__(self, text: str, firewall: bool = False) -> None:
        super().__init__(text)
        self.firewall = firewall


@contextlib.contextmanager
def _connected(address: str, port: int, secret: Secret) -> Iterator[socket.socket]:
    tried = attempt(address, port)
    if tried.kind == "refused":  # the other machine has reported that it listens on this port
        raise _NoConnectionError(_RESET, firewall=True)
    if tried.socket is None:
        raise _NoConnectionError(tried.cause, tried.kind in ("rejected", "no answer"))
    with tried.socket as connection:
        try:
            authenticate(connection, AGENT, secret.key(AGENT), _PATIENCE)
        except (NotAuthenticated, OSError) as error:
            raise _NoConnectionError(f"connected, and then {getattr(error, 'strerror', None) or error}") from None
        connection.settimeout(_PATIENCE)
        yield connection


def _small_messages(connection: socket.socket) -> tuple[float, float, int]:
    """Send small messages, a few at a time, and receive their echoes. Return latency, loss and MTU."""
    connection.sendall(_ECHO)
    began, came, fastest = time.monotonic(), 0, 1e9
    while came < _MESSAGES and time.monotonic() < began + _MESSAGES_SECONDS:
        at = time.monotonic()
        for _ in range(_WINDOW):
            connection.sendall(bytes(_MESSAGE))
        _read(connection, _MESSAGE * _WINDOW)
        fastest = min(fastest, time.monotonic() - at)
        came += _WINDOW
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    again, sent, shortest = (
        struct.unpack_from("=I", info, place)[0] if place + 4 <= len(info) else 0
        for place in (_SENT_AGAIN, _SENT, _ROUND_TRIP)
    )
    mtu = connection.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    latency = shortest * 1e-6 if 0 < shortest < 1e8 else fastest
    return latency, again / sent if again >= _FEW_REPEATS else 0.0, mtu


def _speed(address: str, port: int, secret: Secret) -> float:
    """Send as much data as possible. Return the bytes per second received, without the time spent waiting for a CPU."""
    with _connected(address, port, secret) as connection:
        connection.sendall(_TAKE)
        until, sent, starved = time.monotonic() + 2 * _BURST_SECONDS, 0, _starved()
        connection.settimeout(_POLL_SECONDS)
        data = memoryview(bytes(_CHUNK))
        while sent < _BURST_BYTES and time.monotonic() < until and not select.select([connection], [], [], 0)[0]:
            with contextlib.suppress(TimeoutError):
                sent += connection.send(data)
        starved = _starved() - starved
        connection.settimeout(_PATIENCE)
        count, seconds, theirs = struct.unpack("!Qdd", _read(connection, 24))
        return float(count / max(seconds - starved - theirs, seconds / _MOST_STARVED))


def _receive(connection: socket.socket) -> tuple[int, float, float]:
    """Receive for a time or a number of bytes. Return bytes, seconds, and the seconds spent waiting for a processor."""
    count, buffer = 0, bytearray(_CHUNK)
    began, starved = time.monotonic(), _starved()
    connection.settimeout(_BURST_SECONDS)
    with contextlib.suppress(TimeoutError):
        while count < _BURST_BYTES and (got := connection.recv_into(buffer)):
            count += got
            if time.monotonic() - began > _BURST_SECONDS:
                break
    seconds = time.monotonic() - began
    connection.settimeout(_PATIENCE)
    return count, max(seconds, 1e-6), _starved() - starved


def _starved() -> float:
    """Return the seconds for which this thread was ready to run but waited for a processor."""
    return (number_in(_STARVED, 1) or 0) * 1e-9


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (got := connection.recv(count - len(data))):
            raise ConnectionResetError(104, "closed by the other machine")
        data += got
    return data


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs that pair each machine with every other, at most once per round (the circle method).

    ::

        4 machines   0-3 1-2 | 0-2 3-1 | 0-1 2-3
    """
    places = [*range(count), *([-1] if count % 2 else [])]
    paired = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        paired.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return paired
