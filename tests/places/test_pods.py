"""Pods of the manifest that ``paceline run --on kubernetes`` writes, emulated by network namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pods import Cluster, missing, until

yaml = pytest.importorskip("yaml", reason="needs PyYAML, to read the manifest")
PACELINE = [sys.executable, "-m", "paceline"]
STEPS = 120
SCRIPT = f"""
import sys, time
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
)

def is_quiet():
    world = session._context.world
    client = world.coordinator
    return not (world.leaving or client is None or client.broken or client.pending > world.generation)

for batch in session.batches(steps={STEPS}):
    session.step(batch)
    if sys.argv[1:] and not Path(sys.argv[1]).exists():  # what the test does takes its time; so does a step
        time.sleep(0.1)
        while batch.step >= 20 and is_quiet() and not Path(sys.argv[1]).exists():
            time.sleep(0.02)
print("fingerprint", session.fingerprint(), flush=True)
"""


class Run:
    """A run of two pods, and the volume with its records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.go = folder / "go"
        (folder / "train.py").write_text(SCRIPT)
        command = [*PACELINE, "run", "--on", "kubernetes", "--image", "none", "--volume", "runs", "--nodes", "2"]
        command += ["--name", "first", "--runs-dir", str(folder / "runs"), "--set", "checkpoint.every=10", "--dry-run"]
        shown = subprocess.run([*command, "train.py", str(self.go)], cwd=folder, check=True, capture_output=True)
        self.job = next(one for one in yaml.safe_load_all(shown.stdout) if one["kind"] == "Job")
        self.cluster = Cluster(self.job, "s" * 40, folder)

    def events(self, kind: str) -> list[dict[str, Any]]:
        found = []
        for file in (self.folder / "runs" / "first" / "events").glob("*.jsonl"):
            lines, _, _ = file.read_text().rpartition("\n")  # one may be on its way
            found += [event for event in map(json.loads, lines.splitlines()) if event["event"] == kind]
        return found

    def until_step(self, step: int) -> None:
        until(lambda: any(event["step"] >= step for event in self.events("step")), f"step {step}")

    def to_the_end(self) -> None:
        self.go.touch()
        until(lambda: not self.cluster.control(), "the end of the job")

    def fingerprint(self) -> str:
        """What the runs printed, all of them the same."""
        logs = (self.folder / "runs" / "first" / "output").glob("*.log")
        lines = [line for log in logs for line in log.read_text().splitlines() if line.startswith("fingerprint")]
        assert len(set(lines)) == 1, (lines, self.cluster.said(0), self.cluster.said(1))
        return lines[0]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    if reason := missing():
        pytest.skip(reason)
    made = Run(tmp_path)
    try:
        made.cluster.up()
        yield made
    finally:
        made.cluster.down()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fingerprint of one process."""
    script = tmp_path_factory.mktemp("alone") / "train.py"
    script.write_text(SCRIPT)
    ended = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True)
    return ended.stdout.splitlines()[-1]


def test_a_lost_pod_is_replaced_into_the_run(run: Run, alone: str) -> None:
    run.until_step(5)
    run.cluster.kill(1)
    until(lambda: any(event["lost"] for event in run.events("recovered")), "a recovery")
    run.to_the_end()
    assert run.cluster.codes[0] == [0], run.cluster.said(0)
    assert run.fingerprint() == alone


def test_the_first_pod_comes_back_with_another_address(run: Run, alone: str) -> None:
    until((run.folder / "runs" / "first" / "checkpoints" / "latest").exists, "a checkpoint")
    run.cluster.kill(0)
    run.to_the_end()
    assert run.cluster.codes[0] == [0], run.cluster.said(0)
    assert run.fingerprint() == alone


def test_an_evicted_pod_leaves_and_comes_back(run: Run, alone: str) -> None:
    run.until_step(5)
    run.cluster.evict(1)
    until(lambda: run.cluster.control() and run.cluster.codes[1], "the end of the pod")
    assert run.cluster.codes[1] == [75], run.cluster.said(1)
    run.to_the_end()
    assert run.fingerprint() == alone
