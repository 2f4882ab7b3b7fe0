"""Runs that somebody attacks who has no secret: another user, on this machine and from another one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import Run
from test_machines import PORT, Hosts, alone, hosts, needs_root, until  # noqa: F401 - hosts is a fixture

from paceline.system import secret as secrets

ATTACK = Path(__file__).with_name("attack.py")
SCRIPT = """
import os, subprocess, sys
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
heard = ""
for batch in session.batches(steps=20):
    session.step(batch)
    if batch.step == 5 and session.rank == 0 and "ALONE" not in os.environ:
        where = os.environ["PACELINE_COORDINATOR"].split(":")
        attack = [sys.executable, os.environ["ATTACK"], *where, os.environ.get("ATTACK_SECONDS", "1")]
        heard = subprocess.run(attack, stdout=subprocess.PIPE, text=True, check=True).stdout
tell = {"fingerprint": session.fingerprint(), "heard": heard.splitlines()}
print(__import__("json").dumps(tell), flush=True)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_another_user_of_this_machine(run: Run, undisturbed: Callable[..., dict[str, Any]]) -> None:
    ran = run(SCRIPT, "-n", 2, "--elastic", "1:2", ATTACK=str(ATTACK))
    assert ran.code == 0, ran.report()
    assert {one["fingerprint"] for one in ran.printed()} == {undisturbed(SCRIPT)["fingerprint"]}
    (heard,) = [one["heard"] for one in ran.printed() if one["heard"]]
    assert heard == ["idle 1000", "words ['1', 'paceline', 'refused']"]
    assert [event["event"] for event in ran.launcher() if event["event"] != "refused"] == ["membership", "end"]
    refused = ran.launcher("refused")
    assert sum(event["count"] for event in refused) > 1080
    assert len(refused) < 120
    for file in ran.run.rglob("*"):  # no secret is on the disk
        assert not file.is_file() or b"PACELINE_WORKER_SECRET" not in file.read_bytes()


@pytest.mark.slow
@needs_root
def test_another_machine(hosts: Hosts, tmp_path: Path) -> None:  # noqa: F811
    machines = [hosts.start(place, 80, "--nodes", "1:2", *(["--name", "job"] * (not place))) for place in (0, 1)]
    until(lambda: any(event["event"] == "membership" and len(event["workers"]) == 2 for event in hosts.events()))
    before = [event for event in hosts.events() if event["event"] in ("lost", "membership")]
    attack = ["ip", "netns", "exec", hosts.names[2], sys.executable, str(ATTACK), hosts.address(0), str(PORT), "3"]
    attacked = subprocess.run(attack, capture_output=True, text=True, timeout=200, check=True)
    assert attacked.stdout.splitlines()[1] == "words ['1', 'paceline', 'refused']"
    (tmp_path / "secret").rename(tmp_path / "right")
    secrets.read_or_make(tmp_path / "secret")  # that of another run
    other = hosts.start(2, 80, "--nodes", "1:2")
    assert other.wait(60) == 3
    assert "does not accept the secret of this machine" in hosts.said(2)
    hosts.go.touch()
    assert [machine.wait(90) for machine in machines] == [0, 0]
    assert hosts.fingerprints() == {alone(tmp_path, 80)}
    refused = [event for event in hosts.events() if event["event"] == "refused"]
    assert {event["address"] for event in refused} == {hosts.address(2)}
    assert [event for event in hosts.events() if event["event"] in ("lost", "membership")] == before
