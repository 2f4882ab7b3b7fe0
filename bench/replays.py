"""Whether random steps of runs with kills, resumes, stealing and pipelines have the same bits when they are replayed.

Each run kills a worker in a step, and continues with the others, or with all workers from its newest checkpoint.

    python bench/replays.py --steps 20
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline

STEPS, KILLED = 24, 13
RUNS = {
    "allreduce-killed": ("--elastic", "1:3"),
    "stealing-killed": ("--set", "strategy=stealing", "--elastic", "1:3"),
    "stealing-resumed": ("--set", "strategy=stealing"),
    "pipeline-killed": ("--set", "strategy=pipeline", "--elastic", "1:3"),
    "pipeline-resumed": ("--set", "strategy=pipeline"),
    "sharded-resumed": ("--set", "strategy=sharded"),
}


def train() -> None:
    """Train, and kill rank 1 in a step of the first launch."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1)) for _ in range(4)]
    session = paceline.start(
        model=torch.nn.Sequential(*layers, torch.nn.Linear(16, 1)),
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        loss=functional.mse_loss,
        data=TensorDataset(torch.randn(256, 16), torch.randn(256, 1)),
        batch=24,
        microbatches=12,
        exact=True,
        threads=1,
    )
    sign = Path(os.environ["SIGN"])
    for batch in session.batches(steps=STEPS):
        if batch.step == KILLED and session.rank == 1 and not sign.exists():
            sign.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        session.step(batch)


def paceline_of(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a command of paceline, with the sign that a worker was killed in the folder."""
    command = [sys.executable, "-m", "paceline", *map(str, words)]
    variables = os.environ | {"SIGN": str(folder / "killed")}
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300)


def main() -> None:
    """Run each kind, replay random steps of it, and print the number of steps with the same bits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps to replay, of all runs")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw, same = random.Random(given.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in RUNS.items():
            home = Path(folder) / name
            home.mkdir()
            words = ["run", "--quiet", "-n", 3, "--runs-dir", home, "--name", "one", "--set", "checkpoint.every=5"]
            ran = paceline_of(home, *words, *settings, __file__)
            if ran.returncode and name.endswith("resumed"):
                ran = paceline_of(home, *words, *settings, "--resume", "auto", __file__)
            if ran.returncode:
                raise SystemExit(f"{name}: {ran.stderr}")
        for turn in range(given.steps):
            name, step = list(RUNS)[turn % len(RUNS)], draw.randrange(STEPS)
            replayed = paceline_of(Path(folder) / name, "replay", Path(folder) / name / "one", "--step", step)
            same += replayed.returncode == 0 and f"step {step}: the same bits as recorded" in replayed.stdout
            print(f"{name:<18} {replayed.stdout.strip() or replayed.stderr.strip()}", flush=True)
    print(f"{same} of {given.steps} steps have the same bits")


if __name__ == "__main__":
    train() if "RANK" in os.environ else main()
