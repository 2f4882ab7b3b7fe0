"""Runs on several machines: network namespaces, each with an address and a cable of its own."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fork_server import PACELINE, Command, Forked, ForkServer

from paceline.cli.main import main

PROGRAM = str(Path(sys.executable).with_name("paceline"))
PORT = 29517
STEPS = 200
SCRIPT = """
import os, time
from pathlib import Path
from functools import partial
import torch
import paceline

torch.manual_seed(0)
inputs = torch.randn(512, 16)
session = paceline.start(
    model=torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 4)),
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    loss=torch.nn.functional.cross_entropy,
    data=torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1)),
    batch=32,
    exact=True,
    hang_seconds=3,
)
print("pid", os.getpid(), "at", session.position, flush=True)
for batch in session.batches(steps=STEPS):
    session.step(batch)
    if not Path("GO").exists():  # what the test does takes its time; until it has done it, so does a step
        time.sleep(0.25)
print("fingerprint", session.fingerprint(), flush=True)
"""
TABLE = """
import os, time
from pathlib import Path
from functools import partial
import torch
import paceline

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.top = paceline.SparseEmbedding(500, 4, block=120), torch.nn.Linear(4, 4)
    def forward(self, words):
        return self.top(self.words(words).mean(1))

torch.manual_seed(0)
words = torch.randint(0, 500, (512, 6))
session = paceline.start(
    model=Net(),
    optimizer=partial(torch.optim.Adagrad, lr=0.1),
    loss=torch.nn.functional.cross_entropy,
    data=torch.utils.data.TensorDataset(words, words[:, 0] % 4),
    batch=32,
    strategy="sharded",
    exact=True,
    hang_seconds=3,
)
print("pid", os.getpid(), "at", session.position, flush=True)
for batch in session.batches(steps=STEPS):
    session.step(batch)
    if not Path("GO").exists():
        time.sleep(0.25)
print("fingerprint", session.fingerprint(), flush=True)
"""
able = os.getuid() == 0 and shutil.which("ip") is not None
needs_root = pytest.mark.skipif(not able, reason="needs root and the command ip, to make network namespaces")


class Hosts:
    """Three machines on one network, and the commands that run on them."""

    def __init__(self, folder: Path, server: ForkServer) -> None:
        self.folder = folder
        self._server = server
        self.workers = 1  # of each
        self.script = SCRIPT
        self.go = folder / "go"
        self._mark = f"{os.getpid() % 10000}"
        self._running: list[Forked] = []
        self.names = [f"pl{self._mark}{place}" for place in range(3)]
        self.net = os.getpid() % 200 + 20

    def address(self, place: int) -> str:
        return f"10.{self.net}.77.{place + 1}"

    def up(self) -> None:
        bridge = f"plb{self._mark}"
        _ip(f"link add {bridge} type bridge")
        _ip(f"link set {bridge} up")
        for place, name in enumerate(self.names):
            _ip(f"netns add {name}")
            _ip(f"link add {name}c type veth peer name eth0 netns {name}")
            _ip(f"link set {name}c master {bridge} up")
            _ip(f"-n {name} addr add {self.address(place)}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")
            _ip(f"-n {name} link set lo up")

    def down(self) -> None:
        for process in self._running:
            process.send_signal(signal.SIGKILL)
            process.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            subprocess.run(["ip", "link", "del", f"{name}c"], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", f"plb{self._mark}"], check=False, capture_output=True)

    def limit_rate(self, rate: str) -> None:
        """Let all cables carry no more than that in each direction, as tc writes it."""
        for name in self.names:
            for where, device in ([], f"{name}c"), (["-n", name], "eth0"):
                shape = f"qdisc add dev {device} root tbf rate {rate} burst 500kb latency 500ms".split()
                subprocess.run(["tc", *where, *shape], check=True, capture_output=True)

    def pull_cable(self, place: int) -> None:
        _ip(f"link set {self.names[place]}c down")

    def start(self, place: int, steps: int, *options: str, arguments: tuple[str, ...] = ()) -> Forked:
        """``paceline run`` on one of them; its runs are in a folder of its own."""
        folder = self.folder / str(place)
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(self.script.replace("STEPS", str(steps)).replace("GO", str(self.go)))
        words = [*PACELINE, "run", "-n", str(self.workers), "--quiet"]
        words += ["--rendezvous", f"{self.address(0)}:{PORT}", "--secret-file", str(self.folder / "secret")]
        words += [*options, "train.py", *arguments]
        said = folder / "said"
        (process,) = self._server.start([Command(tuple(words), os.environ, said, said, folder, self.names[place])])
        self._running.append(process)
        return process

    def events(self, places: str = "0") -> list[dict[str, Any]]:
        found = []
        for file in self.folder.glob(f"{places}/runs/*/events/*.jsonl"):
            lines, _, _ = file.read_text().rpartition("\n")  # one may be on its way
            found += map(json.loads, lines.splitlines())
        return found

    def worker(self, place: int) -> int:
        """The process of the newest worker of a machine, which says so after it has become a member."""
        until(lambda: self._workers(place))
        return self._workers(place)[-1]

    def _workers(self, place: int) -> list[int]:
        logs = (self.folder / str(place) / "runs").glob("*/output/*.log")
        lines = [line for log in sorted(logs) for line in log.read_text().splitlines() if line.startswith("pid")]
        return [int(line.split()[1]) for line in lines]

    def fingerprints(self) -> set[str]:
        logs = self.folder.glob("*/runs/*/output/*.log")
        return {line for log in logs for line in log.read_text().splitlines() if line.startswith("fingerprint")}

    def said(self, place: int) -> str:
        return (self.folder / str(place) / "said").read_text()

    def report(self) -> str:
        """What all said and noted, which pytest shows for a test that failed."""
        files = [*self.folder.glob("*/said"), *self.folder.glob("*/runs/*/events/launcher.jsonl")]
        files += self.folder.glob("*/runs/*/output/*.log")
        texts = ((file.relative_to(self.folder), file.read_text(errors="replace")[-4000:]) for file in sorted(files))
        return "\n".join(f"-- {name}\n{text}" for name, text in texts)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


@pytest.fixture
def hosts(fork_server: ForkServer, tmp_path: Path) -> Iterator[Hosts]:
    lab = Hosts(tmp_path, fork_server)
    try:
        lab.up()
        yield lab
    finally:
        lab.down()
        print(lab.report())


def steps_done(hosts: Hosts) -> int:
    return max((event["step"] for event in hosts.events() if event["event"] == "step"), default=-1)


def alone(folder: Path, steps: int, script: str = SCRIPT) -> str:
    """The fingerprint of one process that nobody disturbs."""
    return last_line_of(folder, script.replace("STEPS", str(steps)).replace("GO", str(folder)))


def last_line_of(folder: Path, script: str, *arguments: str) -> str:
    """What one process prints at its end."""
    assert ForkServer.used is not None
    path, out, err = (folder / f"alone.{name}" for name in ("py", "out", "err"))
    path.write_text(script)
    command = Command((str(path), *arguments), os.environ, out, err)
    assert ForkServer.used.run(command, 120.0) == 0, err.read_text()
    return out.read_text().splitlines()[-1]


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_killed_and_a_cable_pulled(hosts: Hosts, tmp_path: Path, workers: int) -> None:
    hosts.workers = workers
    nodes = ["--nodes", "1:3"]
    agents = [
        hosts.start(0, STEPS, *nodes, "--name", "job"),
        hosts.start(1, STEPS, *nodes),
        hosts.start(2, STEPS, *nodes),
    ]
    until(lambda: any(len(members) == 3 * workers for members in memberships(hosts)))
    until(lambda: steps_done(hosts) > 5)
    os.kill(hosts.worker(1), signal.SIGKILL)
    until(lambda: any(event["event"] == "recovered" and event["lost"] for event in hosts.events()))
    after = steps_done(hosts)
    until(lambda: steps_done(hosts) > after + 5)
    hosts.pull_cable(2)
    hosts.go.touch()
    assert [agents[place].wait(90) for place in (0, 1)] == [0, 0]
    assert hosts.fingerprints() == {alone(tmp_path, STEPS)}
    lost = [event["reason"] for event in hosts.events() if event["event"] == "lost"]
    told = "cannot be reached", "killed by signal 9"  # its connection has ended, and its agent says so: which is first?
    assert any(text in reason for text in told for reason in lost), lost
    steps = [event for event in hosts.events("*") if event["event"] == "step"]
    assert {event["step"] for event in steps} == set(range(STEPS))
    first = [event["step"] for event in steps if event["rank"] == 0]  # the killed worker's last events may be missing
    assert len(first) == len(set(first))


@pytest.mark.slow(turns=9)
@needs_root
@pytest.mark.parametrize("machines", [2, 3])
def test_a_table_that_machines_divide_survives(hosts: Hosts, tmp_path: Path, machines: int) -> None:
    """A worker is killed and replaced. Then a machine is lost: of two machines, the last worker has the whole table."""
    hosts.script = TABLE
    agents = [hosts.start(place, 50, "--nodes", f"1:{machines}", "--name", "job") for place in range(machines)]
    until(lambda: any(len(members) == machines for members in memberships(hosts)))
    until(lambda: steps_done(hosts) > 5)
    os.kill(hosts.worker(1), signal.SIGKILL)
    until(lambda: any(event["event"] == "recovered" and event["lost"] for event in hosts.events()))
    until(lambda: len(memberships(hosts)[-1]) == machines)
    after = steps_done(hosts)
    until(lambda: steps_done(hosts) > after + 5)
    hosts.pull_cable(machines - 1)
    hosts.go.touch()
    assert [one.wait(90) for one in agents[:-1]] == [0] * (machines - 1)
    assert hosts.fingerprints() == {alone(tmp_path, 50, TABLE)}


def memberships(hosts: Hosts) -> list[list[int]]:
    """The workers of each generation, by rank."""
    return [event["workers"] for event in hosts.events() if event["event"] == "membership"]


@pytest.mark.slow
@needs_root
def test_the_machine_of_the_coordinator_dies_and_comes_back(hosts: Hosts, tmp_path: Path) -> None:
    shared = ["--nodes", "1:2", "--set", f"checkpoint.directory={tmp_path / 'saved'}", "--set", "checkpoint.every=10"]
    shared += ["--resume", "auto"]
    first = hosts.start(0, 80, "--name", "job", *shared)
    other = hosts.start(1, 80, *shared)
    until(lambda: any(event["event"] == "membership" and len(event["workers"]) == 2 for event in hosts.events()))
    until(lambda: (tmp_path / "saved" / "latest").exists())
    first.send_signal(signal.SIGKILL)  # `ip netns exec` has become the command itself
    first.wait()
    until(lambda: "waiting for it to come back" in hosts.said(1))
    again = hosts.start(0, 80, "--name", "job", *shared)
    until(lambda: [event["event"] for event in hosts.events()].count("agent-joined") == 2)
    hosts.go.touch()  # not before: alone, the first machine would be ready before the other asks again
    assert again.wait(90) == 0
    assert other.wait(90) == 0
    assert hosts.fingerprints() == {alone(tmp_path, 80)}


def secret_in(folder: Path) -> Path:
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text(32 * "x")
    return secret


def refused(tmp_path: Path, *options: str) -> tuple[int, str]:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it should not start')")
    command = [PROGRAM, "run", *options, str(script)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, ended.stderr


def test_a_name_that_stands_for_nothing(tmp_path: Path) -> None:
    code, said = refused(tmp_path, "--nodes", "2", "--rendezvous", "no-such-machine.invalid:29500")
    assert code == 3
    assert "the name 'no-such-machine.invalid' has no address" in said.splitlines()[0]


@pytest.mark.slow
def test_nobody_answers(tmp_path: Path) -> None:
    where = ["--rendezvous", "192.0.2.1:29500", "--secret-file", str(secret_in(tmp_path))]
    code, said = refused(tmp_path, "--nodes", "2", *where, "--patience", "2")
    assert code == 3
    assert "could not reach the run at 192.0.2.1:29500 in 2 s" in said.splitlines()[0]


@pytest.mark.slow
def test_another_program_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        code, said = refused(tmp_path, "--nodes", "2", "--rendezvous", address)
    assert code == 3
    assert f"What answers at {address} is not a Paceline run with this secret" in said.splitlines()[0]


@pytest.mark.parametrize(
    "options",
    [("--nodes", "2"), ("--rendezvous", "localhost:29500"), ("--nodes", "3:1", "--rendezvous", "localhost:29500")],
    ids=" ".join,
)
def test_options_that_make_no_sense(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *options, "train.py"])
    assert ended.value.code == 2
    assert "--nodes" in capsys.readouterr().err
