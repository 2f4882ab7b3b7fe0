import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import StartError
from paceline.launchers import machine
from paceline.launchers.machine import Allowed, check_allowed


def test_this_machine() -> None:
    here = machine.measure()
    assert here.cores == os.sched_getaffinity(0)
    assert all(domain <= here.cores for domain in here.domains)


@pytest.mark.parametrize(("text", "cores"), [("0-2,8\n", {0, 1, 2, 8}), ("5", {5}), ("\n", set())])
def test_core_lists(text: str, cores: set[int]) -> None:
    assert machine.core_list(text) == cores


def test_a_port_in_use_is_refused() -> None:
    port = machine.choose_port(None)  # one that no connection is given when it is free again
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(StartError, match=f"--port {port} cannot be used: Address already in use"):
            machine.choose_port(port)
    assert machine.choose_port(port) == port


def test_no_connection_is_given_the_port_that_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 10_000 <= machine.choose_port(None) < int(machine._GIVEN_PORTS.read_text().split()[0])
    monkeypatch.setattr(machine, "_GIVEN_PORTS", tmp_path / "unknown")
    assert 1 <= machine.choose_port(None) <= 65535


@pytest.mark.skipif(sys.platform != "linux", reason="marks are names in a network namespace of Linux")
def test_a_port_that_was_drawn_and_is_not_bound_yet_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Same:
        def randrange(self, lowest: int, below: int) -> int:
            return next(draws)

    first, second = machine.choose_port(None), machine.choose_port(None)
    for mark in machine._marks:
        os.close(mark)
    machine._marks.clear()
    monkeypatch.setattr(machine, "SystemRandom", Same)
    draws = iter([first])
    assert machine.choose_port(None) == first
    again = f"from paceline.launchers import machine; machine._draw({first})"
    other = subprocess.run([sys.executable, "-c", again], capture_output=True, text=True, check=False)
    assert "Address already in use" in other.stderr
    draws = iter([first, second])
    assert machine.choose_port(None) == second
    assert len(machine._marks) == 2


def test_only_the_last_draws_are_marked() -> None:
    for _ in range(machine._MOST_MARKS + 2):
        machine.choose_port(None)
    assert len(machine._marks) <= machine._MOST_MARKS


@pytest.mark.parametrize(
    ("allowed", "here", "largest", "text"),
    [
        (Allowed(files=1024, most_files=4096), 256, 256, r"256 workers, 256 of them .* need 1600 .* limit is 1024 "),
        (
            Allowed(files=1024, most_files=4096),
            8,
            1024,
            r"need 1128 open files .* Run `ulimit -n 1128` before the start\.",
        ),
        (Allowed(files=1024, most_files=1024), 8, 1024, r"hard limit above the 1024 of now: nofile in"),
        (
            Allowed(processes=500),
            64,
            64,
            r"64 workers .* about 908 processes and threads; the limit is 500 .*ulimit -u",
        ),
    ],
)
def test_more_workers_than_the_system_allows(allowed: Allowed, here: int, largest: int, text: str) -> None:
    with pytest.raises(StartError, match=text):
        check_allowed(here, largest, allowed)


def test_as_many_workers_as_the_system_allows() -> None:
    check_allowed(64, 64, Allowed(files=1024, most_files=1024, processes=4096))
    check_allowed(8, 512, Allowed(files=1024))
    check_allowed(512, 65536, Allowed())


def test_the_limit_is_seen_before_a_worker_starts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('started')")
    shell = ["/bin/sh", "-c", 'ulimit -n 200; exec "$@"', "sh", sys.executable, "-m", "paceline.cli.main"]
    run = [*shell, "run", "-n", "32", "--runs-dir", str(tmp_path / "runs"), str(script)]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0 and "started" not in ended.stdout
    assert "32 workers, 32 of them on this machine, need 256 open files" in " ".join(ended.stderr.split())
    assert not (tmp_path / "runs").exists()
