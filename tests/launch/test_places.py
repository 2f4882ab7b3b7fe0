"""What all places share: options, hosts, the command of an agent, the processes that stand for it here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.cli.run import bounds
from paceline.environments import env
from paceline.errors import ConfigError
from paceline.launchers.base import Request
from paceline.launchers.clusters import registry
from paceline.launchers.clusters.base import (
    Agent,
    Options,
    Place,
    Placement,
    agent_command,
    parse_hosts,
    read_hostfile,
    secret_environment,
)
from paceline.launchers.clusters.clients import Client, follow
from paceline.launchers.workers import stop_signals

FORMATS = "h1 slots=4\nh2:2  # the small one\n\n# none\nh3\nh1 max_slots=9 slots=1\n"


def test_hosts() -> None:
    assert parse_hosts("h1:4,h2", slots=2) == [("h1", 4), ("h2", 2)]


@pytest.mark.parametrize("text", ["", "h1:", "h1:0", "h1:x", "h1,,h2", "-oProxyCommand=x:1", "h1:2,h1:2", "h1:99999"])
def test_what_are_no_hosts(text: str) -> None:
    with pytest.raises(ConfigError, match="-H"):
        parse_hosts(text, slots=1)


def test_hostfile(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(FORMATS)
    assert read_hostfile(tmp_path / "hosts", slots=3) == [("h1", 5), ("h2", 2), ("h3", 3)]


@pytest.mark.parametrize("text", ["", "# none\n", "h1 slots=many\n", "h1:0\n"])
def test_what_is_no_hostfile(text: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError, match="hosts"):
        read_hostfile(tmp_path / "hosts", slots=3)


def test_the_fewest_workers_may_be_on_several_machines() -> None:
    assert bounds("2:3", 1, 0, several=True) == (2, 3)
    assert bounds(None, 4, 1, several=True) == (None, None)  # 4 are those of one machine
    assert bounds(None, 4, 1, several=False) == (4, 4)
    with pytest.raises(ConfigError, match="number of workers to start with, 1, is out of range"):
        bounds("2:3", 1, 0, several=False)


def test_options_as_on_the_command_line() -> None:
    options = Options(hosts="h1:4,h2", gpus=2, detach=True)
    assert options.words() == ["--hosts", "h1:4,h2", "--gpus", "2", "--detach"]


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["run", *words])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    known = registry.place_named
    monkeypatch.setattr(registry, "place_named", lambda name: TwoAgents if name == "here" else known(name))
    assert "--image is an option of a place" in refusal(["--image", "x", str(script)], capsys)
    assert "--image has no effect with --on here" in refusal(["--on", "here", "--image", "x", str(script)], capsys)
    both = ["--on", "here", "--nodes", "2", "--rendezvous", "h:1", str(script)]
    assert "leave out either it or --on" in refusal(both, capsys)


def test_a_place_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--on nowhere: there is no such place. The places are: local" in refusal(["--on", "nowhere", "x.py"], capsys)


class TwoAgents(Place):
    """Two agents on this machine."""

    port = 0

    def decide(self, request: Request, options: Options, environment: Mapping[str, str]) -> Placement:
        where = f"127.0.0.1:{self.port}"
        counts = (2, 1)
        commands = [tuple(agent_command(request, count, sum(counts), (2, 2), where)) for count in counts]
        known = secret_environment(request)
        return Placement("here", tuple(Agent(f"m{n}", one, known) for n, one in enumerate(commands)), "two agents")

    def carry_out(self, placement: Placement, request: Request) -> int:
        clients = [Client(one.machine, one.command, one.environment) for one in placement.agents]
        return follow(clients, request.grace_seconds, lambda client, code: True)


SCRIPT = """
from functools import partial
import torch
import paceline

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
session = paceline.start(
    model=torch.nn.Linear(4, 1), optimizer=partial(torch.optim.SGD, lr=0.1), loss=torch.nn.functional.mse_loss,
    data=data, batch=12, exact=True,
)
for batch in session.batches(epochs=2):
    session.step(batch)
print("fingerprint", session.fingerprint())
"""


@pytest.mark.slow
def test_agents_train_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.launchers.machine import choose_port

    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    alone = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout.split()[-1]
    place = TwoAgents()
    place.port = choose_port(None)
    request = Request(script, workers=2, runs=tmp_path / "runs", name="one", patience_seconds=60)
    placement = place.decide(request, Options(), {})
    assert env.SECRET not in repr(placement)
    assert place.carry_out(placement, request) == 0, capsys.readouterr()
    assert f"fingerprint {alone}" in capsys.readouterr().out
    launched = json.loads((tmp_path / "runs" / "one" / "launch.json").read_text())
    assert launched


def test_one_that_cannot_be_started(capfd: pytest.CaptureFixture[str]) -> None:
    assert follow([Client("m", ["/no/such/program"])], 1.0, lambda client, code: False) == 127
    assert "/no/such/program cannot be started" in capfd.readouterr().err


def test_the_end_of_one_may_end_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    up = tmp_path / "up"
    stops = f"trap 'echo stopped; exit 7' TERM; echo up; touch {up}; while :; do sleep 0.1; done"
    waits = Client("first", ["sh", "-c", stops])
    fails = Client("second", ["sh", "-c", f"until [ -e {up} ]; do sleep 0.1; done; echo no >&2; exit 9"])
    seen: list[tuple[str, int]] = []

    def ended(client: Client, code: int) -> bool:
        seen.append((client.name, code))
        return False

    assert follow([waits, fails], 20.0, ended) == 7
    assert seen[0] == ("second", 9)
    shown = capfd.readouterr()
    assert shown.out == "up\nstopped\n" and shown.err == "[second] no\n"


@pytest.mark.parametrize("by_signal", [True, False])
def test_a_signal_stops_all(by_signal: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By SIGTERM, or by a line of the standard input."""
    trap, wait = (
        ("trap 'exit 75' TERM", "while :; do sleep 0.1; done") if by_signal else (":", "grep -qx stop; exit 75")
    )
    lines = None if by_signal else b"begin\n"
    up = tmp_path / "up"
    both = f"{trap}; until [ -e {up} ]; do sleep 0.1; done; kill -INT {os.getpid()}; {wait}"
    first = Client("first", ["sh", "-c", both], first_input=lines)
    second = replace(first, name="second", command=["sh", "-c", f"{trap}; touch {up}; {wait}"])
    before = signal.getsignal(signal.SIGINT)
    assert follow([first, second], 20.0, lambda client, code: True) == 75
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with stop_signals() as found:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGTERM)
        assert found == [signal.SIGUSR1, signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_agents_of_another_thread(capfd: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(1) as pool:
        clients = [Client("one", [sys.executable, "-c", "print('trained')"])]
        code = pool.submit(follow, clients, 1.0, lambda client, code: True).result()
    assert (code, capfd.readouterr().out) == (0, "trained\n")


def test_a_hostfile_with_what_ssh_would_take_for_an_option(tmp_path: Path) -> None:
    for line in ("-oProxyCommand=true slots=1", ":4"):
        (tmp_path / "hosts").write_text(f"h1\n{line}\n")
        with pytest.raises(ConfigError, match=r"line 2: .* does not begin with the name of a host"):
            read_hostfile(tmp_path / "hosts", 1)


def doctor(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *words])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out + said.err


def test_the_commands_of_doctors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-H", "h1:4,h2:2", "--data", "d", "--checkpoints", "c", "--json", "--dry-run", "train.py"]
    code, said = doctor(words, capsys)
    first, second = said.splitlines()
    assert "doctor --on local --workers 4 --nodes 2 --rendezvous h1:PORT --patience 60 --runs-dir runs" in first
    assert "--workers 2" in second and "--data d --checkpoints c --json train.py" in second
    assert code == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--on", "kubernetes"], "the doctor cannot be started there from here"),
        (["--on", "slurm"], "the doctor examines the nodes of an allocation"),
        (["--on", "nowhere"], "there is no such place"),
        (["--on", "ssh", "-H", "h1:0"], "give hosts and their numbers of workers"),
        (["--gpus", "2"], "name the place with --on"),
        (["--secret-file", "s"], "give --rendezvous and --nodes, too"),
    ],
)
def test_doctors_that_cannot_be_started(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = doctor(words, capsys)
    assert text in said
    assert code == 2
