"""One worker: trains a perceptron in one way, and tells its step times and the bytes of its machine's link."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import paceline

WARM = 3
BITS_BATCH = 16
"""Samples of a batch that is the same on all layouts: as many as there are workers on the largest."""
OPTIMIZER = partial(torch.optim.SGD, lr=1e-3)
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def model_of(megabytes: int) -> nn.Sequential:
    """Linear layers of 4 MB each."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(megabytes // 4) for layer in (nn.Linear(1024, 1024), nn.Tanh())))


def ddp(model: nn.Module, data: torch.utils.data.Dataset[object], steps: int) -> list[float]:
    """Each worker one sample a step; its link is idle before and after."""
    seconds = []
    shared = DistributedDataParallel(model)
    optimizer = OPTIMIZER(shared.parameters())
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(WARM + steps):
        begin = time.perf_counter()
        features, target = data[(step * size + rank) % len(data)]  # type: ignore[arg-type]
        optimizer.zero_grad()
        mse_loss(shared(features[None]), target[None]).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        mark(step)
    return seconds[WARM:]


def ours(
    model: nn.Module, data: torch.utils.data.Dataset[object], steps: int, batch: int, **way: object
) -> tuple[list[float], str]:
    """The same with Paceline, in microbatches of one sample; the seconds and the fingerprint of the state."""
    seconds = []
    session = paceline.start(
        model=model, optimizer=OPTIMIZER, loss=mse_loss, data=data, batch=batch, microbatches=batch, **way
    )
    batches = session.batches(steps=WARM + steps)
    for step in range(WARM + steps):
        begin = time.perf_counter()
        session.step(next(batches))
        seconds.append(time.perf_counter() - begin)
        mark(step)
    return seconds[WARM:], session.fingerprint()


counted = [0, 0]


def mark(step: int) -> None:
    """Read how much has left this machine, once the first steps are done and at the last one."""
    together()
    counted[step >= WARM] = int(SENT.read_text()) if SENT.exists() else 0
    together()


def together() -> None:
    """Wait for the others, if there are any."""
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    folder, way, megabytes, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    samples = torch.randn(256, 1024, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(samples, samples.flip(0))
    model = model_of(megabytes)
    fingerprint, size = "", int(os.environ["WORLD_SIZE"])
    if way == "ddp":
        dist.init_process_group("gloo")
        seconds = ddp(model, data, steps)
    elif way.startswith("bits-"):
        kind = way.removeprefix("bits-")
        seconds, fingerprint = ours(model, data, steps, BITS_BATCH, exact=True if kind == "exact" else kind)
    else:
        reduction = "collective" if way == "collective" else "auto"
        seconds, fingerprint = ours(model, data, steps, size, exact=way == "exact", reduction=reduction)
    found = {
        "seconds": seconds,
        "bytes": (counted[1] - counted[0]) / steps,
        "gradients": 4 * sum(value.numel() for value in model.parameters()),
        "fingerprint": fingerprint,
    }
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    together()
