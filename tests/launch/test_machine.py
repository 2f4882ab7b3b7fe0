import os
import socket
from pathlib import Path

import pytest

from paceline.errors import StartError
from paceline.launchers import machine


def test_this_machine() -> None:
    here = machine.look()
    assert here.cores == os.sched_getaffinity(0)
    assert all(domain <= here.cores for domain in here.domains)


@pytest.mark.parametrize(("text", "cores"), [("0-2,8\n", {0, 1, 2, 8}), ("5", {5}), ("\n", set())])
def test_core_lists(text: str, cores: set[int]) -> None:
    assert machine.core_list(text) == cores


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"--port {port} cannot be used: Address already in use"):
            machine.choose_port(port)
    assert machine.choose_port(port) == port


def test_no_connection_is_given_the_port_that_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 10_000 <= machine.choose_port(None) < int(machine._GIVEN_PORTS.read_text().split()[0])
    monkeypatch.setattr(machine, "_GIVEN_PORTS", tmp_path / "unknown")
    assert 1 <= machine.choose_port(None) <= 65535
