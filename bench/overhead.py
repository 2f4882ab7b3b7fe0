"""What Paceline costs beyond the plain loop: a step, and a call of torch.distributed that is recorded.

The step: session, events, sampler, checks. One process, a model so small that its computation hardly counts. The plain
loop and Paceline's take turns, one step each.

The call: an all_reduce of ten numbers between two workers; torch's own and the recorded one take turns. As the time of
such a call varies by more than it costs to record it, a function that does nothing is recorded as well.

    python bench/overhead.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.testing.ranks import run

STEPS = 3000
BATCH = 32
OPTIMIZER = partial(torch.optim.SGD, lr=0.1)

CALLS = """
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import paceline
from paceline.comm.desync import patch

torch.manual_seed(0)
session = paceline.start(
    model=torch.nn.Linear(1, 1), optimizer=partial(torch.optim.SGD, lr=0.1), loss=torch.nn.functional.mse_loss,
    data=TensorDataset(torch.ones(8, 1), torch.ones(8, 1)), batch=8, threads=1,
)
values = torch.ones(10)

def seconds_of_one(function):
    begin = time.perf_counter()
    function(values)
    return time.perf_counter() - begin

def nothing(values):
    pass

plain = dist.all_reduce.__wrapped__
pairs = [
    (plain, dist.all_reduce),
    (nothing, patch.recorder("all_reduce", nothing)),
]
for pair in pairs:
    times = [], []
    for turn in range(4000):
        for place in (0, 1) if turn % 2 else (1, 0):
            times[place].append(seconds_of_one(pair[place]))
    medians = [1e6 * statistics.median(column[100:]) for column in times]
    if session.rank == 0:
        print(f"{medians[0]:6.1f}   recorded {medians[1]:6.1f}", flush=True)
    dist.barrier()
"""


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def plain(data: TensorDataset) -> Iterator[None]:
    """The loop as one writes it without a library; it looks at the loss, as Paceline does."""
    network = model()
    optimizer = OPTIMIZER(network.parameters())
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    while True:
        for features, target in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(network(features), target)
            loss.backward()
            optimizer.step()
            loss.item()
            yield


def paced(data: TensorDataset) -> Iterator[None]:
    """The same with Paceline."""
    session = paceline.start(
        model=model(),
        optimizer=OPTIMIZER,
        loss=functional.cross_entropy,
        data=data,
        batch=BATCH,
        threads=1,
    )
    for batch in session.batches(epochs=1_000_000):
        session.step(batch)
        yield


def seconds_of_one(loop: Iterator[None]) -> float:
    begin = time.perf_counter()
    next(loop)
    return time.perf_counter() - begin


def main() -> None:
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(4096, 8), torch.randint(0, 4, (4096,)))
    print("microseconds a step, median; one process, no computation to speak of")
    raw, ours = plain(data), paced(data)
    pairs = [(seconds_of_one(raw), seconds_of_one(ours)) for _ in range(STEPS)][100:]
    medians = [1e6 * statistics.median(column) for column in zip(*pairs, strict=True)]
    extra = 1e6 * statistics.median(b - a for a, b in pairs)
    print(f"plain {medians[0]:6.0f}   paceline {medians[1]:6.0f}   extra {extra:6.0f}", flush=True)
    print("microseconds a call of torch.distributed, median; 2 workers")
    with tempfile.TemporaryDirectory() as folder:
        first, *_ = run(CALLS, 2, Path(folder))
    assert first.code == 0, first.err
    for name, line in zip(("all_reduce", "nothing"), first.out.splitlines(), strict=True):
        print(f"{name:10s} {line}", flush=True)


if __name__ == "__main__":
    main()
