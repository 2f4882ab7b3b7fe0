"""Which sockets of a process are those of gloo, by the addresses that it has published."""

from __future__ import annotations

import socket
import struct

import pytest

from paceline.comm.rendezvous.gloo_sockets import gloo_sockets, listens


def published(listener: socket.socket) -> bytes:
    """What gloo writes to the store: the name of the machine and the address, each after its length."""
    host, port = listener.getsockname()
    address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host) + bytes(8)
    return struct.pack("=Q", 4) + b"host" + struct.pack("=Q", len(address)) + address


def test_the_sockets_of_a_published_address_are_found() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as gloo,
        socket.create_server(("127.0.0.1", 0)) as foreign,
        socket.create_connection(gloo.getsockname()) as connected,
        socket.create_connection(foreign.getsockname()),
    ):
        (here,) = gloo_sockets([published(gloo)], [])
        with here:
            assert listens(here) and here.getsockname() == gloo.getsockname()
        (there,) = gloo_sockets([], [published(gloo)])
        with there:
            assert not listens(there) and there.getsockname() == connected.getsockname()


@pytest.mark.parametrize("value", [b"", b"text", b"\xff" * 128, bytes(128)], ids=["none", "short", "NCCL", "zeros"])
def test_values_that_gloo_has_not_written_are_left_out(value: bytes) -> None:
    """NCCL writes the identifier of its communicator, which begins with a random number."""
    assert not [*gloo_sockets([value], [value])]
