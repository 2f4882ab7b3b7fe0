"""Time to the first step, and of a replacement: forked workers, workers that are new Pythons, and torchrun.

Four workers start in turn each way; printed are medians and ratios. The replacement is of a worker that is killed in an
elastic run without a standby, from the kill to the first step of the new one.

    python bench/start_time.py [ROUNDS]
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

WORKERS, LIMIT = 4, 300.0
BIN = Path(sys.executable).parent
PACELINE = """
import os, sys, time
from functools import partial
from pathlib import Path
import torch
import paceline

torch.manual_seed(0)
inputs = torch.randn(256, 32)
session = paceline.start(
    model=torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4)),
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    loss=torch.nn.functional.cross_entropy,
    data=torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1)),
    batch=64,
)
folder, worker = Path(sys.argv[1]), os.environ["PACELINE_WORKER"]
for batch in session.batches(steps=int(sys.argv[2])):
    session.step(batch)
    if not (folder / worker).exists():
        (folder / f".{worker}").write_text(f"{os.getpid()} {time.time()}")
        (folder / f".{worker}").rename(folder / worker)
    time.sleep(0.01)
"""
TORCHRUN = """
import os, sys, time
from pathlib import Path
import torch

torch.distributed.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.nn.functional.cross_entropy(model(torch.randn(16, 32)), torch.zeros(16, dtype=torch.long)).backward()
optimizer.step()
Path(sys.argv[1], os.environ["RANK"]).write_text(f"{os.getpid()} {time.time()}")
torch.distributed.destroy_process_group()
"""


def await_step(folder: Path, worker: int) -> tuple[int, float]:
    """Wait for the first step of a worker. Returns its process and the time."""
    until = time.monotonic() + LIMIT
    while not (words := (folder / str(worker)).read_text().split() if (folder / str(worker)).exists() else []):
        if time.monotonic() > until:
            raise TimeoutError(f"worker {worker} has not trained within {LIMIT:.0f} s")
        time.sleep(0.005)
    return int(words[0]), float(words[1])


def first_step(command: list[str], steps: str) -> float:
    """Seconds from the start of a command to the first step of its last worker."""
    with tempfile.TemporaryDirectory() as name:
        folder, begin = Path(name), time.time()
        process = subprocess.Popen(
            [*command, name, steps], cwd=folder.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        last = max(await_step(folder, worker)[1] for worker in range(WORKERS))
        process.wait()
        return last - begin


def replacement(command: list[str]) -> float:
    """Seconds from the kill of a worker to the first step of the worker that replaces it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = subprocess.Popen(
            [*command, name, "1000000"], cwd=folder.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        pids = [await_step(folder, worker)[0] for worker in range(WORKERS)]
        time.sleep(1)
        begin = time.time()
        os.kill(pids[1], signal.SIGKILL)
        _, trained = await_step(folder, WORKERS)
        process.send_signal(signal.SIGTERM)
        process.wait()
        return trained - begin


def compare(title: str, ways: dict[str, Callable[[], float]], rounds: int) -> None:
    """Measure each way in turn, and print medians and their ratios to the first one."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, measure in ways.items():
            found[name].append(measure())
    first = next(iter(found.values()))
    for name, seconds in found.items():
        ratio = statistics.median(mine / other for mine, other in zip(first, seconds, strict=True))
        print(f"{title}, {name}: {statistics.median(seconds):.2f} s; forked / this {ratio:.2f}", flush=True)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as temporary:
        ours, theirs = Path(temporary) / "train.py", Path(temporary) / "ddp.py"
        ours.write_text(PACELINE)
        theirs.write_text(TORCHRUN)
        run = [sys.executable, "-m", "paceline", "run", "-n", str(WORKERS), "--quiet", "--runs-dir", temporary]
        elastic = [*run, "--elastic", f"1:{WORKERS}"]
        torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(WORKERS), str(theirs)]
        starts = {
            "forked": lambda: first_step([*run, str(ours)], "3"),
            "--no-preload": lambda: first_step([*run, "--no-preload", str(ours)], "3"),
            "torchrun": lambda: first_step(torchrun, "3"),
        }
        replaces = {
            "forked": lambda: replacement([*elastic, str(ours)]),
            "--no-preload": lambda: replacement([*elastic, "--no-preload", str(ours)]),
        }
        compare(f"first step of {WORKERS} workers", starts, rounds)
        compare("a replacement", replaces, rounds)


if __name__ == "__main__":
    main()
