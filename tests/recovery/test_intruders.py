"""Runs that somebody attacks who has no secret: another user, on this machine and from another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_machines import PORT, Hosts, alone, hosts, needs_root, until  # noqa: F401 - hosts is a fixture

from paceline.launch import secret as secrets

ATTACK = Path(__file__).with_name("attack.py")
PACELINE = str(Path(sys.executable).with_name("paceline"))
SCRIPT = """
import os, time
from pathlib import Path
from functools import partial
import torch
import paceline

torch.manual_seed(0)
inputs = torch.randn(256, 16)
session = paceline.start(
    model=torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4)),
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    loss=torch.nn.functional.cross_entropy,
    data=torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1)),
    batch=32,
    exact=True,
)
for batch in session.batches(steps=40):
    session.step(batch)
    if batch.step == 5 and "PACELINE_RUN" in os.environ:
        address = Path("address")
        if session.rank == 0:
            Path("new").write_text(os.environ["PACELINE_COORDINATOR"])
            Path("new").rename(address)
        while not Path("attacked").exists():
            time.sleep(0.05)
print("fingerprint", session.fingerprint(), flush=True)
"""


def fingerprints(text: str) -> set[str]:
    return {line.rpartition(" ")[2] for line in text.splitlines() if "fingerprint" in line}


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_another_user_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = [PACELINE, "run", "-n", "2", "--elastic", "1:2", "--name", "job", "train.py"]
    with (tmp_path / "said").open("w") as said:
        training = subprocess.Popen(run, cwd=tmp_path, stdout=said, stderr=said)
    try:
        until(lambda: (tmp_path / "address").exists())
        host, _, port = (tmp_path / "address").read_text().rpartition(":")
        seconds = os.environ.get("ATTACK_SECONDS", "1")
        attack = [sys.executable, str(ATTACK), host, port, seconds]
        attacked = subprocess.run(attack, capture_output=True, text=True, timeout=200, check=False)
        assert attacked.stderr == ""
        assert attacked.stdout.splitlines()[0] == "idle 1000"
        assert attacked.stdout.splitlines()[1] == "words ['1', 'paceline', 'refused']"
    finally:
        (tmp_path / "attacked").touch()
        code = training.wait(120)
    said_text = (tmp_path / "said").read_text()
    assert code == 0, said_text
    reference = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120
    )
    assert fingerprints(said_text) == fingerprints(reference.stdout)
    log = (tmp_path / "runs" / "job" / "events" / "launcher.jsonl").read_text()
    events = [json.loads(line) for line in log.splitlines()]
    assert [event["event"] for event in events if event["event"] != "refused"] == ["membership", "end"]
    refused = [event for event in events if event["event"] == "refused"]
    assert sum(event["count"] for event in refused) > 1080
    assert len(refused) < 120
    for file in tmp_path.rglob("*"):  # no secret is on the disk
        if file.is_file():
            assert b"SECRET" not in file.read_bytes()


@pytest.mark.slow
@needs_root
def test_another_machine(hosts: Hosts, tmp_path: Path) -> None:  # noqa: F811
    machines = [hosts.start(place, 200, "--nodes", "1:2", *(["--name", "job"] * (not place))) for place in (0, 1)]
    until(lambda: any(event["event"] == "membership" and len(event["workers"]) == 2 for event in hosts.events()))
    attack = ["ip", "netns", "exec", hosts.names[2], sys.executable, str(ATTACK), hosts.address(0), str(PORT), "3"]
    attacked = subprocess.run(attack, capture_output=True, text=True, timeout=200, check=True)
    assert attacked.stdout.splitlines()[1] == "words ['1', 'paceline', 'refused']"
    (tmp_path / "secret").rename(tmp_path / "right")
    secrets.read_or_make(tmp_path / "secret")  # that of another run
    other = hosts.start(2, 200, "--nodes", "1:2")
    assert other.wait(60) == 3
    assert "does not accept the secret of this machine" in hosts.said(2)
    hosts.go.touch()
    assert [machine.wait(90) for machine in machines] == [0, 0]
    assert hosts.fingerprints() == {alone(tmp_path, 200)}
    refused = [event for event in hosts.events() if event["event"] == "refused"]
    assert {event["address"] for event in refused} == {hosts.address(2)}
    assert [event["event"] for event in hosts.events() if event["event"] in ("lost", "membership")] == ["membership"]
