"""A script that trains layers that sleep. In a folder it writes the seconds of its steps."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline

sys.path.append(str(Path(__file__).resolve().parent.parent / "pipeline"))
from sleeping import sharpen_sleep

WARM = 8
STEPS = 8


class _Asleep(torch.autograd.Function):
    """The identity, forward and backward, after a sleep for each sample."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds * len(values))
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.seconds * len(gradient))
        return gradient, None


class _OfWeight(torch.autograd.Function):
    """The identity of the first argument; the gradient of the weight sleeps for each sample."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds, ctx.weight = seconds, weight
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.seconds * len(gradient))
        return None, torch.zeros_like(ctx.weight), None


class Asleep(nn.Module):
    """A layer whose forward pass, and each half of whose backward pass, sleep ``seconds`` for each sample."""

    def __init__(self, numel: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        self.seconds = seconds

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return _Asleep.apply(values, self.seconds) + _OfWeight.apply(
            torch.zeros_like(values), self.weight, self.seconds
        )


def model_of(given: dict[str, Any]) -> nn.Module:
    """Return a model of the given layers, each with a size in MB and milliseconds per sample."""
    layers = [Asleep(int(megabytes * 2**18), 1e-3 * ms) for megabytes, ms in given["layers"]]
    return nn.Sequential(nn.Linear(given["width"], given["width"]), *layers)


def main(given: dict[str, Any], folder: Path | None) -> None:
    """Train for some steps."""
    sharpen_sleep()
    if given.get("realtime"):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    samples = torch.randn(512, given["width"])
    session = paceline.start(
        model=model_of(given),
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        loss=nn.functional.mse_loss,
        data=torch.utils.data.TensorDataset(samples, samples),
        batch=given["batch"],
        threads=1,
        timeout_seconds=120,
        audit="off",
        **given["settings"],
    )
    seconds = []
    begin = time.perf_counter()
    for batch in session.batches(steps=WARM + STEPS):
        session.step(batch)
        seconds.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    if folder is not None:
        (folder / f"{session.rank}.json").write_text(json.dumps({"seconds": seconds[WARM:]}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
