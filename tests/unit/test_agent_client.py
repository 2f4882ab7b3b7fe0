"""What the coordinator tells the agent of another machine."""

import socket

from paceline.coordinator.machines import AgentClient, Applicant, Rendezvous, _register
from paceline.coordinator.messages import Connection, encode


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
