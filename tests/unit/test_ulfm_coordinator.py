"""The coordinator of an mpiexec that survives losses: no agent reports how workers end."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.comm.rendezvous.ulfm_coordinator import UlfmCoordinator, number_of
from paceline.system import secret


@pytest.mark.parametrize("ending", [False, True])
def test_a_connection_that_ends_is_a_loss_unless_the_script_has_ended(ending: bool) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    coordinator = UlfmCoordinator(listener, secret.make(), 2)
    try:
        number, peer = number_of(0), SimpleNamespace(worker=number_of(0))
        found: Any = coordinator
        found._workers[number] = peer
        worker = coordinator.membership.workers[number]
        worker.ending = ending
        found.disconnected(peer)
        assert worker.state == "gone" and worker.finished == ending
        assert coordinator.membership.fenced != ending
    finally:
        coordinator.close()
