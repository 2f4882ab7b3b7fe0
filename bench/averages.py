"""What averages of the weights cost in a step: with and without in turns, in one process.

::

    python bench/averages.py [--rounds 15] [--steps 10]
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from statistics import median

import torch
from torch import nn

import paceline


def session_of(kind: str | None) -> paceline.Session:
    """Train 6 million weights on little data, so that the update is a good part of a step."""
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (nn.Linear(1000, 1000), nn.ReLU())]
    inputs = torch.randn(256, 1000)
    return paceline.start(
        model=nn.Sequential(*layers),
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
        loss=nn.functional.mse_loss,
        data=torch.utils.data.TensorDataset(inputs, inputs),
        batch=32,
        microbatches=1,
        average=kind,
        threads=1,
    )


def main() -> None:
    """Print the median of the seconds of a step with each kind, and the ratio to none."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    kinds = None, "ema", "swa"
    sessions = {kind: session_of(kind) for kind in kinds}
    seconds: dict[str | None, list[float]] = {kind: [] for kind in kinds}
    for _ in range(given.rounds):
        for kind, session in sessions.items():
            for batch in session.batches(steps=given.steps):
                begin = time.perf_counter()
                session.step(batch)
                seconds[kind].append(time.perf_counter() - begin)
    for kind, values in seconds.items():
        ratio = median(values) / median(seconds[None])
        print(f"{kind}: median {median(values) * 1000:.2f} ms, least {min(values) * 1000:.2f} ms, {ratio:.3f} x none")


if __name__ == "__main__":
    main()
