"""A launcher that is written in one file and registered: nothing else has to know of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spawn_launcher import SpawnLauncher

from paceline.cli.main import main
from paceline.errors import ConfigError
from paceline.launchers import registry

TRAIN = """
from functools import partial
import torch
import paceline

torch.manual_seed(0)
inputs = torch.randn(60, 8)
session = paceline.start(
    model=torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)),
    optimizer=partial(torch.optim.AdamW, lr=0.01),
    loss=torch.nn.functional.mse_loss,
    data=torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)),
    batch=16,
    exact=True,
)
for batch in session.batches(epochs=2):
    session.step(batch)
print(session.workers, session.fingerprint())
"""
KILLED = "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)\n"


@pytest.fixture
def spawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "LAUNCHERS", dict(registry.LAUNCHERS))
    registry.register("spawn", SpawnLauncher)
    yield


def run(script: Path) -> int:
    """Run ``paceline run`` with two workers of the new launcher; gives its exit code."""
    options = ["--launcher", "spawn", "-n", "2", "--name", "it", "--runs-dir", str(script.parent), "--quiet"]
    with pytest.raises(SystemExit) as ended:
        main(["run", *options, str(script)])
    return int(ended.value.code or 0)


@pytest.mark.slow
@pytest.mark.usefixtures("spawn")
def test_two_workers_train_the_bits_of_one_process(ranks: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    (alone,) = ranks(script, 1, tmp_path)
    assert run(script) == 0
    workers, fingerprint = (tmp_path / "it" / "output" / "rank-0.log").read_text().split()
    assert workers == "2"
    assert alone.out.split() == ["1", fingerprint]


@pytest.mark.usefixtures("spawn")
def test_why_a_worker_ended(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(KILLED)
    assert run(script) == 5
    assert (tmp_path / "it" / "failure.txt").read_text().startswith("rank 1: was killed by signal 9 (SIGKILL)\n")


def test_a_launcher_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"There is no launcher 'nowhere'\. The launchers are: local\."):
        registry.launcher_named("nowhere")
