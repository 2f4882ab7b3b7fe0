"""Measure the link between two machines: each listens on a port of its own, as workers do, and the other connects.

::

    client   connect ── 400 small messages, 16 on their way ──> their median time, and how many were sent again
             connect ── as much as goes in a second ──────────> bytes a second
                     <── as much as goes in a second ──
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.coordinator.authentication import AGENT, NotAuthenticated, admit, authenticate
from paceline.doctor.reach import attempt
from paceline.launchers.secret import Secret

_MESSAGES, _WINDOW, _MESSAGE = 400, 16, 64
_BURST_BYTES, _BURST_SECONDS = 64 << 20, 0.7
_CHUNK = 1 << 18
_PATIENCE = 5.0
_MESSAGES_SECONDS = 4.0
_IP_MTU = 14
_SENT_AGAIN, _SENT = 100, 136
"""Where the kernel's ``tcp_info`` has the segments that were repeated, and all."""
_ECHO, _TAKE, _GIVE = b"e", b"t", b"g"


@dataclass(frozen=True)
class Link:
    """What one machine measured of the link to another one.

    Attributes:
        problem: why there is none; empty if there is.
        firewall: what refused the connection is a firewall, not a machine without a listener.
        latency: median seconds of a round trip.
        loss: the share of small messages, both ways, that had to be sent again.
        there: bytes a second towards the other machine.
        back: and from it.
        mtu: bytes of a packet on the way.
        blocked: small messages pass, and large ones do not.
    """

    problem: str = ""
    firewall: bool = False
    latency: float = 0.0
    loss: float = 0.0
    there: float = 0.0
    back: float = 0.0
    mtu: int = 0
    blocked: bool = False


class Listener:
    """The end of this machine that the others connect to; it serves until it is closed.

    Args:
        address: of this machine, that the others know it by.
        secret: that whoever connects must know.
    """

    def __init__(self, address: str, secret: Secret) -> None:
        self._socket = socket.create_server((address, 0), backlog=128)
        self._secret = secret
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name="paceline-doctor", daemon=True).start()

    def close(self) -> None:
        """Listen no longer."""
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
                _echo(connection)
            elif wanted == _TAKE:
                count, seconds = _receive(connection)
                connection.sendall(struct.pack("!Qd", count, seconds))
                with contextlib.suppress(OSError):
                    while connection.recv(_CHUNK):
                        pass
            elif wanted == _GIVE:
                _send(connection)


def measure(address: str, port: int, secret: Secret) -> Link:
    """Measure the link to a machine that listens."""
    try:
        with _connected(address, port, secret) as connection:
            latency, loss, mtu = _small_messages(connection)
    except _NoConnectionError as error:
        return Link(problem=str(error), firewall=error.firewall)
    except OSError as error:
        return Link(problem=f"the connection broke while small messages were sent: {error.strerror or error}")
    try:
        there, back = _take(address, port, secret), _give(address, port, secret)
    except OSError as error:
        return Link(problem=f"the connection broke under load: {error.strerror or error}", latency=latency, mtu=mtu)
    return Link("", False, latency, loss, there, back, mtu, blocked=not (there and back))


def knock(address: str, port: int, secret: Secret) -> Link:
    """Only try whether a machine that listens can be reached."""
    try:
        with _connected(address, port, secret):
            return Link()
    except _NoConnectionError as error:
        return Link(problem=str(error), firewall=error.firewall)


class _NoConnectionError(Exception):
    def __init__(self, text: str, firewall: bool = False) -> None:
        super().__init__(text)
        self.firewall = firewall


@contextlib.contextmanager
def _connected(address: str, port: int, secret: Secret) -> Iterator[socket.socket]:
    tried = attempt(address, port)
    if tried.socket is None:
        raise _NoConnectionError(tried.cause, tried.kind in ("rejected", "no answer")) from None
    with tried.socket as connection:
        try:
            authenticate(connection, AGENT, secret.key(AGENT), _PATIENCE)
        except (NotAuthenticated, OSError) as error:
            raise _NoConnectionError(f"connected, and then {getattr(error, 'strerror', None) or error}") from None
        connection.settimeout(_PATIENCE)
        yield connection


def _small_messages(connection: socket.socket) -> tuple[float, float, int]:
    """Send small messages, a few at once, and have them sent back; gives latency, loss, and the MTU."""
    connection.sendall(_ECHO)
    started, times, came = time.monotonic(), list[float](), 0
    until = started + _MESSAGES_SECONDS
    for number in range(10):  # one at a time: the time of a round trip
        at = time.monotonic()
        connection.sendall(bytes(_MESSAGE))
        _read(connection, _MESSAGE)
        times.append(time.monotonic() - at)
        if number >= 2 and time.monotonic() - started > _MESSAGES_SECONDS / 4:
            break
    while came < _MESSAGES and time.monotonic() < until:
        for _ in range(_WINDOW):
            connection.sendall(bytes(_MESSAGE))
        _read(connection, _MESSAGE * _WINDOW)
        came += _WINDOW
    again, sent = _repeated(connection)
    connection.sendall(b"\x01")
    theirs_again, theirs_sent = struct.unpack("!QQ", _read(connection, 16))
    mtu = connection.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    lost = again + theirs_again
    return statistics.median(times), lost / max(1, sent + theirs_sent) if lost > 2 else 0.0, mtu


def _echo(connection: socket.socket) -> None:
    while data := connection.recv(_CHUNK):
        if data.endswith(b"\x01"):
            connection.sendall(struct.pack("!QQ", *_repeated(connection)))
            return
        connection.sendall(data)


def _take(address: str, port: int, secret: Secret) -> float:
    """Send as much as goes; gives the bytes a second that the other machine received."""
    with _connected(address, port, secret) as connection:
        connection.sendall(_TAKE)
        with contextlib.suppress(OSError):
            _send(connection, until_answer=True)
        count, seconds = struct.unpack("!Qd", _read(connection, 16))
        return float(count / seconds)


def _give(address: str, port: int, secret: Secret) -> float:
    """Receive as much as goes; gives the bytes a second."""
    with _connected(address, port, secret) as connection:
        connection.sendall(_GIVE)
        count, seconds = _receive(connection)
        return count / seconds


def _send(connection: socket.socket, until_answer: bool = False) -> None:
    """Send until enough was sent, or the other end has had its time."""
    data, sent, until = bytes(_CHUNK), 0, time.monotonic() + 2 * _BURST_SECONDS
    connection.settimeout(0.05)
    view = memoryview(data)
    while sent < _BURST_BYTES and time.monotonic() < until:
        with contextlib.suppress(TimeoutError):
            sent += connection.send(view)
        if until_answer and _has_answer(connection):
            break
    connection.settimeout(_PATIENCE)
    if not until_answer:
        connection.shutdown(socket.SHUT_WR)


def _has_answer(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(0.05)


def _receive(connection: socket.socket) -> tuple[int, float]:
    """Receive for a while, or until enough has come; gives bytes, and seconds since the first of them."""
    count, started, buffer = 0, time.monotonic(), bytearray(_CHUNK)
    connection.settimeout(_BURST_SECONDS)
    with contextlib.suppress(TimeoutError):
        while count < _BURST_BYTES and (got := connection.recv_into(buffer)):
            count += got
            if time.monotonic() - started > _BURST_SECONDS:
                break
    connection.settimeout(_PATIENCE)
    return count, max(time.monotonic() - started, 1e-6)


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        got = connection.recv(count - len(data))
        if not got:
            raise ConnectionResetError(104, "closed by the other machine")
        data += got
    return data


def _repeated(connection: socket.socket) -> tuple[int, int]:
    """How many segments this end has sent again, and all that it sent, as the kernel counts them."""
    with contextlib.suppress(OSError, struct.error):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return struct.unpack_from("=I", info, _SENT_AGAIN)[0], struct.unpack_from("=I", info, _SENT)[0]
    return 0, 0


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Pair everybody with everybody, in rounds in which nobody is in two pairs (the circle method).

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
