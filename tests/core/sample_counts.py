"""A task whose weights tell how often each sample was used, in any order and on any number of workers.

The loss is the mean output of a linear layer: its gradient is the mean of the inputs, whatever the weights. The inputs
are whole numbers, the batch and the learning rate powers of two, so in float64 each sum is exact.
"""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

LENGTH, BATCH, FEATURES, RATE = 128, 16, 6, 2.0**-6
STEPS = LENGTH // BATCH


def inputs() -> torch.Tensor:
    random = torch.Generator().manual_seed(9)
    return torch.randint(1, 1 << 20, (LENGTH, FEATURES), generator=random).double()


def model() -> nn.Module:
    layer = nn.Linear(FEATURES, 1, bias=False).double()
    nn.init.zeros_(layer.weight)
    return nn.Sequential(layer)


def mean_output(layers: nn.Module, microbatch: Any) -> torch.Tensor:
    """The loss; a worker may be told to be slow: ``SLOW=0.01,0,0`` are the seconds for a microbatch, by rank."""
    seconds = [float(word) for word in os.environ.get("SLOW", "0").split(",")]
    time.sleep(seconds[int(os.environ["RANK"]) % len(seconds)] if "RANK" in os.environ else 0.0)
    return layers(microbatch[0]).mean()


def start(**more: Any) -> paceline.Session:
    return paceline.start(
        **{
            "model": model(),
            "optimizer": partial(torch.optim.SGD, lr=RATE),
            "forward": mean_output,
            "data": TensorDataset(inputs()),
            "batch": BATCH,
            "microbatches": 4,
            "timeout_seconds": 30,
        }
        | more
    )


def weights(session: paceline.Session) -> list[float]:
    (weight,) = session._context.compute.model.parameters()
    values: list[float] = weight.flatten().tolist()
    return values


def expected(epochs: float) -> list[float]:
    """The weights when each sample was used exactly so many times."""
    total = inputs().sum(0) * (epochs * RATE / BATCH)
    return [-value for value in total.tolist()]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.5)


def rows() -> TensorDataset:
    """Samples of which each has a row of its own."""
    return TensorDataset(torch.arange(LENGTH))


def table() -> nn.Module:
    made = nn.Embedding(LENGTH, 4, sparse=True).double()
    nn.init.zeros_(made.weight)
    return made


def picked(embedding: nn.Module, microbatch: Any) -> torch.Tensor:
    """The loss of such samples; its gradient is 1 / batch in each element of the rows."""
    mean_output(lambda _: torch.zeros(1), microbatch)  # type: ignore[arg-type]
    return embedding(microbatch[0]).sum(1).mean()


def updates_in(folder: Path, event: str = "update") -> list[dict[str, Any]]:
    """The updates that the workers of a run recorded, or other events."""
    paths = sorted((folder / "events").glob("rank-*.jsonl"))
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [one for one in lines if one["event"] == event]
