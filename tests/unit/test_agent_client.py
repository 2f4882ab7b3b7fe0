"""Which machine holds the coordinator, and what it tells the agents of the others."""

import socket

import pytest

from paceline.coordinator import machines
from paceline.coordinator.machines import AgentClient, Applicant, Rendezvous, _register, listen_if_here
from paceline.coordinator.wire.messages import Connection, encode, listen
from paceline.errors import StartError
from paceline.launchers.machine import choose_port


def test_what_comes_with_the_first_answer_is_kept() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            run = {"type": "run", "first": 1000, "id": "1", "name": "first", "resume": None}
            theirs.sendall(encode(run) + encode({"type": "shown", "worker": 1000}))
            connection = Connection(ours)
            where = Rendezvous("here", "127.0.0.1", 1)
            client = AgentClient(connection, *_register(connection, Applicant(1, "train.py", None, {}), where))
            assert (client.first, client.shown, client.over) == (1000, 1000, None)
            theirs.sendall(encode({"type": "not-joined"}))
            client.await_end(or_refusal=True)
            assert client.not_joined and client.over is None
            theirs.sendall(encode({"type": "end", "code": 0, "reason": "", "save": False}))
            client.await_end(or_refusal=False)  # another worker of this machine trains
            assert client.over is not None


def test_a_port_that_was_refused_to_both_who_asked_at_once_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = iter([True, False])

    def refuse_first(address: tuple[str, int]) -> socket.socket:
        if next(refused):
            raise StartError("in use")
        return listen(address)

    monkeypatch.setattr(machines, "listen", refuse_first)
    where = Rendezvous("here", "127.0.0.1", choose_port(None))
    first = listen_if_here(where)
    assert first is not None
    monkeypatch.setattr(machines, "listen", listen)
    with first:
        assert first.getsockname() == (where.address, where.port)
        assert listen_if_here(where) is None
