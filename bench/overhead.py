"""What a step of Paceline costs beyond the plain loop: session, events, sampler, checks.

One process, a model so small that its computation hardly counts. The plain loop and Paceline's take turns, one step
each.

    python bench/overhead.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import paceline

STEPS = 3000
BATCH = 32
OPTIMIZER = partial(torch.optim.SGD, lr=0.1)


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


if __name__ == "__main__":
    main()
