"""Which of this process's sockets are gloo's.

gloo tells nobody, but publishes in the store where each worker listens. So a connection is gloo's if one of its ends is
such an address: its own end where it was accepted, its other end where gloo has connected. No other socket of this
process can have them: while gloo listens, the kernel gives its port to nobody else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Container, Iterable, Iterator

_SOCKETS = "/proc/self/fd"
_NAME_BYTES = {socket.AF_INET: 8, socket.AF_INET6: 24}
"""Of a socket address: its family, port and host."""
_LENGTH = struct.Struct("=Q")
_LIBC = ctypes.CDLL(None, use_errno=True)


def gloo_sockets(own: Iterable[bytes], others: Iterable[bytes]) -> Iterator[socket.socket]:
    """Open gloo's sockets once more, each to be closed by the caller.

    Args:
        own: what this worker has written into the store.
        others: what it has read there.
    """
    here, there = {_published(value) for value in own} - {b""}, {_published(value) for value in others} - {b""}
    for number in map(int, os.listdir(_SOCKETS)) if os.path.isdir(_SOCKETS) else ():
        if _is_gloo(number, here, there):
            with contextlib.suppress(OSError):
                found = socket.socket(fileno=os.dup(number))
                if _is_gloo(found.fileno(), here, there):  # the number may have changed hands since
                    yield found
                else:
                    found.close()


def listens(one: socket.socket) -> bool:
    """Whether it is no connection, but waits for some."""
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _published(value: bytes) -> bytes:
    """Where a worker listens; empty if gloo has not written this.

    gloo writes the name of the machine and the address, each after its length. Unused bytes behind are not cleared.
    """
    try:
        (host,) = _LENGTH.unpack_from(value)
        (address,) = _LENGTH.unpack_from(value, _LENGTH.size + host)
    except struct.error:
        return b""
    start = 2 * _LENGTH.size + host
    return _shortened(value[start:]) if 2 <= address <= len(value) - start else b""


def _is_gloo(number: int, here: Container[bytes], there: Container[bytes]) -> bool:
    return _name(_LIBC.getsockname, number) in here or _name(_LIBC.getpeername, number) in there


def _name(ask: ctypes._NamedFuncPointer, number: int) -> bytes:
    """Return the address of one end of a TCP socket as the system writes it; empty if there is none."""
    room, size = ctypes.create_string_buffer(128), ctypes.c_uint32(128)
    if ask(number, room, ctypes.byref(size)) != 0:
        return b""
    return _shortened(room.raw)


def _shortened(address: bytes) -> bytes:
    """Without what does not count."""
    (family,) = struct.unpack_from("=H", address)
    return address[: _NAME_BYTES.get(family, 0)]
