"""Search for the sockets of gloo in this process.

gloo has no interface for its sockets, but publishes each worker's listening address in the store. A connection belongs
to gloo if its local end (accepted) or its remote end (connected) is a published address. No other socket of this
process can have these addresses, because the kernel gives gloo's port to no other socket while gloo listens.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Container, Iterable, Iterator

_SOCKETS = "/proc/self/fd"
_NAME_BYTES = {socket.AF_INET: 8, socket.AF_INET6: 24}  # bytes of a socket address that hold its family, port and host
_LENGTH = struct.Struct("=Q")
_LIBC = ctypes.CDLL(None, use_errno=True)


def gloo_sockets(own: Iterable[bytes], others: Iterable[bytes]) -> Iterator[socket.socket]:
    """Yield a duplicate of each of gloo's sockets. The caller closes it."""
    here, there = {_published(value) for value in own} - {b""}, {_published(value) for value in others} - {b""}
    numbers = map(int, os.listdir(_SOCKETS)) if os.path.isdir(_SOCKETS) else ()
    for number in [one for one in numbers if _is_gloo(one, here, there)]:  # a list, because duplicates reuse numbers
        with contextlib.suppress(OSError):
            found = socket.socket(fileno=os.dup(number))
            if _is_gloo(found.fileno(), here, there):  # the descriptor may have been reused meanwhile
                yield found
            else:
                found.close()


def listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _published(value: bytes) -> bytes:
    """Return the listening address in a store value, or empty bytes if gloo has not written the value.

    gloo writes the name of the machine and the address, each after its length. Unused bytes of the address are not
    cleared.
    """
    try:
        (host,) = _LENGTH.unpack_from(value)
        (address,) = _LENGTH.unpack_from(value, _LENGTH.size + host)
    except (struct.error, OverflowError):  # NCCL wrote the value, so the length is arbitrary
        return b""
    start = 2 * _LENGTH.size + host
    return _shortened(value[start:]) if 2 <= address <= len(value) - start else b""


def _is_gloo(number: int, here: Container[bytes], there: Container[bytes]) -> bool:
    return _name(_LIBC.getsockname, number) in here or _name(_LIBC.getpeername, number) in there


def _name(ask: ctypes._NamedFuncPointer, number: int) -> bytes:
    """Return the address of one end of a TCP socket in the system's format, or empty bytes if it has none."""
    room, size = ctypes.create_string_buffer(128), ctypes.c_uint32(128)
    return _shortened(room.raw) if ask(number, room, ctypes.byref(size)) == 0 else b""


def _shortened(address: bytes) -> bytes:
    """Return the bytes of an address that hold family, port and host."""
    (family,) = struct.unpack_from("=H", address)
    return address[: _NAME_BYTES.get(family, 0)]
