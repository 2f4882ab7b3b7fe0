"""What starts in a Ray cluster, as data; and a coordinator without workers of its own, as it is used there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.environments import env
from paceline.errors import ConfigError, StartError
from paceline.launchers.base import Request
from paceline.launchers.clusters import ray as place
from paceline.launchers.clusters.base import Options
from paceline.launchers.machine import choose_port

SCRIPT = """
from functools import partial
import torch
import paceline

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.ones(16, 4), torch.ones(16, 1))
session = paceline.start(
    model=torch.nn.Linear(4, 1), optimizer=partial(torch.optim.SGD, lr=0.1), loss=torch.nn.functional.mse_loss,
    data=data, batch=8,
)
for batch in session.batches(epochs=1):
    session.step(batch)
print("the last line of", session.workers)
"""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "find_spec", lambda name: SimpleNamespace())


@pytest.mark.usefixtures("installed")
def test_what_starts() -> None:
    request = Request(Path("train.py"), workers=2, nodes=(1, 3))
    given = {"PACELINE_SEED": "4", "HOME": "/home/x"}
    placement = place.RayPlace().decide(request, Options(gpus=2), given)
    here, *there = placement.agents
    assert here.command[here.command.index("-n") + 1] == "0"
    assert len(there) == 3 and there[0].command[there[0].command.index("--elastic") + 1] == "2:6"
    assert there[0].environment == {"PACELINE_SEED": "4", **here.environment}
    assert "placement group: 1 x 2 CPU, 2 GPU, strategy STRICT_SPREAD" in placement.text
    assert here.environment[env.SECRET] not in placement.text


@pytest.mark.usefixtures("installed")
def test_slots_that_may_share_a_node() -> None:
    request = Request(Path("train.py"), nodes=(2, 4), least=2, most=4)
    placement = place.RayPlace().decide(request, Options(slot_cpus=3, gpus=1), {})
    assert "placement group: 2 x 3 CPU, 1 GPU, strategy PACK" in placement.text
    assert len(placement.agents) == 5 and "-n 1 " in placement.text
    assert Options(slot_cpus=3, gpus=1).words() == ["--gpus", "1"]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("options", [Options(address="ray://head:10001"), Options(gpus=-1)])
def test_options_that_cannot_be_used(options: Options) -> None:
    with pytest.raises(ConfigError, match=r"give auto|negative"):
        place.RayPlace().decide(Request(Path("train.py")), options, {})


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "find_spec", lambda name: None)
    with pytest.raises(StartError, match=re.escape("pip install 'paceline[ray]'")):
        place.RayPlace().decide(Request(Path("train.py")), Options(), {})


def test_in_a_ray_job() -> None:
    assert place.RayPlace.found({"RAY_ADDRESS": "head:6379"}) == "RAY_ADDRESS is set"
    assert place.RayPlace.found({"HOME": "/"}) is None


def run(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline", "run", "--on", "local", *words, str(folder / "train.py")]
    variables = {**os.environ, env.SECRET: "7" * 64}
    return subprocess.Popen(
        command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def several(patience: int) -> list[str]:
    where = f"127.0.0.1:{choose_port(None)}"
    return ["--nodes", "1", "--rendezvous", where, "--elastic", "2:2", "--patience", str(patience)]


@pytest.mark.slow
def test_a_coordinator_without_workers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = several(patience=100)
    first = run(tmp_path, "-n", "0", "--name", "one", *options)
    while not (tmp_path / "runs" / "one" / "launch.json").exists() and first.poll() is None:
        time.sleep(0.05)
    second = run(tmp_path, "-n", "2", *options)
    shown, _ = first.communicate(timeout=200)
    said, _ = second.communicate(timeout=200)
    assert (first.returncode, second.returncode) == (0, 0), shown + said
    assert "[rank 0] the last line of 2" in shown
    assert "the last line" not in said


@pytest.mark.slow
def test_nobody_comes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    one = run(tmp_path, "-n", "0", *several(patience=1))
    said, _ = one.communicate(timeout=100)
    assert one.returncode == 3 and "0 of at least 2 workers came within 1 s" in said, said


def test_no_workers_at_all(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    said, _ = run(tmp_path, "-n", "0").communicate(timeout=100)
    assert "at least one worker must train. With 0 this machine only holds the coordinator" in said
