"""Requests between workers: who is refused, what is too long, what becomes of an error and of a lost worker."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline.comm.servers.rpc import RpcClient, RpcServer
from paceline.comm.waiting import Waiting
from paceline.coordinator.types import Membership
from paceline.errors import InputError, WorkerLost, WorkerSilent

KEY = b"k" * 32
MOST = 1 << 20


@pytest.fixture
def server() -> Iterator[RpcServer]:
    made = RpcServer("127.0.0.1", KEY, MOST)
    made.serve("echo", lambda rank, words, data: ((rank, words), (data,)))
    yield made
    made.close()


@pytest.fixture
def client_of(server: RpcServer) -> Iterator[Callable[..., RpcClient]]:
    made: list[RpcClient] = []

    def connect(key: bytes = KEY, most: int = MOST) -> RpcClient:
        world: Any = Waiting(Membership(3, 5), 20.0)
        made.append(RpcClient(world, 1, ("127.0.0.1", server.port), key, most))
        return made[-1]

    yield connect
    for one in made:
        one.close()


def test_words_and_bytes_come_back(server: RpcServer, client_of: Any) -> None:
    client = client_of()
    assert client.ask("echo", {"a": [1.5]}, (b"12", memoryview(b"3"))) == ((3, {"a": [1.5]}), bytearray(b"123"))
    assert client.ask("echo", None) == ((3, None), bytearray())
    client.close()
    assert client.ask("echo", 4)[0] == (3, 4)  # a new connection
    assert server.connected() == {3}


def test_a_request_waits_for_its_handler(server: RpcServer, client_of: Any) -> None:
    client = client_of()
    client.start("late", 1)
    time.sleep(0.1)  # the request arrives meanwhile
    server.serve("late", lambda rank, words, data: (words, ()))
    assert client.finish()[0] == 1
    client.start("never")
    server.close()
    with pytest.raises((RuntimeError, WorkerLost)):
        client.finish()


def test_an_answer_that_was_not_taken_is_not_that_to_the_next_request(client_of: Any) -> None:
    client = client_of()
    client.start("echo", 1)  # an answer of another worker raised an error
    client.start("echo", 2)
    assert client.finish()[0] == (3, 2) and client.ask("echo", 3)[0] == (3, 3)


def test_only_the_time_for_which_an_answer_arrives_is_a_wait_for_the_link(client_of: Any) -> None:
    """Before its beginning, the other worker may wait for others."""
    client, now = client_of(), [0.0]
    read, client._world.clock = client._read, lambda: now[0]

    def slow(into: memoryview) -> int:
        now[0] += 1.0
        return int(read(into))

    client._read = slow
    client.ask("echo", 1, (b"12",))
    assert now[0] == 3.0 and client._world.take_waits().links == [(1, 2.0)]


def test_an_error_of_the_handler_is_raised_here(server: RpcServer, client_of: Any) -> None:
    def refuse(rank: int, words: Any, data: bytearray) -> Any:
        raise InputError("the optimizer said no")

    server.serve("refuse", refuse)
    client = client_of()
    with pytest.raises(InputError, match="the optimizer said no"):
        client.ask("refuse")
    assert client.ask("echo", 1)[0] == (3, 1)


def test_who_has_another_key_is_refused(server: RpcServer, client_of: Any) -> None:
    with pytest.raises(WorkerLost, match="does not accept this key"):
        client_of(b"x" * 32).ask("echo")
    assert client_of().ask("echo", 1)[0] == (3, 1)


def test_a_stranger_learns_nothing_and_ends_only_its_own_connection(server: RpcServer, client_of: Any) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as stranger:
        assert stranger.recv(1000).startswith(b"paceline 1 ")
        stranger.sendall(struct.pack("<QQ", 1 << 60, 1 << 60) * 32)
        assert stranger.recv(1000) in (b"refused\n", b"")
    assert client_of().ask("echo", 1)[0] == (3, 1)


def test_what_is_too_long_ends_the_connection(server: RpcServer, client_of: Any) -> None:
    client = client_of()
    with pytest.raises(WorkerLost, match="lost rank 1"):
        client.ask("echo", None, (bytes(MOST + 1),))
    assert client.ask("echo", 1)[0] == (3, 1)
    with pytest.raises(WorkerLost, match=r"a message of \d+ and 100 bytes"):
        client_of(most=99).ask("echo", None, (bytes(100),))


def test_a_silent_worker_is_named(server: RpcServer, client_of: Any) -> None:
    busy = threading.Event()
    server.serve("wait", lambda rank, words, data: (busy.wait(20), ()))
    client = client_of()
    client.ask("echo")  # it is connected, however long that took
    client.seconds = 0.3
    with pytest.raises(WorkerSilent, match="waited 0 s for an answer from rank 1"):
        client.ask("wait")
    busy.set()


def test_a_server_that_ends_is_a_lost_worker_and_so_is_a_client(server: RpcServer, client_of: Any) -> None:
    ended = threading.Event()
    ranks: list[int] = []
    server.on_end(lambda rank: (ranks.append(rank), ended.set())[0])
    client = client_of()
    client.ask("echo")
    client.close()
    assert ended.wait(20) and ranks == [3]
    client.ask("echo")
    server.close()
    with pytest.raises(WorkerLost, match="rank 1"):
        client.ask("echo")
