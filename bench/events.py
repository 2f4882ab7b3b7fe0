"""What records cost: the time of a step at each level of ``events``, beside steps that record nothing.

The levels take turns within one run, ten steps each, so what else the machine does falls on all of them alike. The
processor time of rank 0 counts all its threads, with the one that writes the records. Medians.

    python bench/events.py --workers 3 --strategy pipeline
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import Any

import torch
from torch.utils.data import TensorDataset

import paceline

LEVELS = "none", "minimal", "steps", "operations"
TURN, STEPS, WARM = 10, 800, 40


def choose(session: Any, level: str) -> None:
    """Record at this level from now on."""
    events, world = session._context.events, session._context.world
    events.mark = (lambda *_, **__: None) if level == "none" else partial(type(events).mark, events)
    events.level = "operations" if level == "none" else level
    world.mark = events.mark if level == "operations" else None


def train() -> None:
    """Train, and print the medians on rank 0."""
    torch.manual_seed(0)
    width = int(os.environ["WIDTH"])
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(8)]
    session = paceline.start(
        model=torch.nn.Sequential(*layers, torch.nn.Linear(width, 1)),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        loss=torch.nn.functional.mse_loss,
        data=TensorDataset(torch.randn(4096, width), torch.randn(4096, 1)),
        batch=256,
        audit="off",
        threads=1,
    )
    times: dict[str, list[float]] = {level: [] for level in LEVELS}
    processor: dict[str, list[float]] = {level: [] for level in LEVELS}
    events: Any = session._context.events
    since = 0.0
    for batch in session.batches(steps=STEPS):
        turn, place = divmod(batch.step, TURN)
        level = LEVELS[(turn if turn // len(LEVELS) % 2 else -1 - turn) % len(LEVELS)]
        if place == 0:
            choose(session, level)
            since = time.process_time()
        begin = time.perf_counter()
        session.step(batch)
        if place > 0 and batch.step >= WARM:
            times[level].append(time.perf_counter() - begin)
        if place == TURN - 1 and batch.step >= WARM:
            events.flush()
            processor[level].append((time.process_time() - since) / TURN)
    for what, measured in (("time", times), ("processor time", processor)):
        medians = {level: statistics.median(values) for level, values in measured.items()}
        for level, seconds in medians.items():
            more = 100 * (seconds / medians["none"] - 1)
            session.print(f"{what:<15} {level:<12} {1e3 * seconds:8.3f} ms a step  {more:+6.2f} %")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--strategy", default="allreduce")
    parser.add_argument("--width", type=int, default=512)
    given = parser.parse_args()
    words = ["-m", "paceline", "run", "--quiet", "-n", str(given.workers), "--set", f"strategy={given.strategy}"]
    with tempfile.TemporaryDirectory() as runs:
        environment = os.environ | {"WIDTH": str(given.width)}
        subprocess.run([sys.executable, *words, "--runs-dir", runs, __file__], check=True, env=environment)


if __name__ == "__main__":
    train() if "PACELINE_RUN" in os.environ else main()
