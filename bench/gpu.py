"""Step time on one GPU beside DistributedDataParallel, in one process that is a group of one NCCL rank.

So it shows what a step costs besides what NCCL sends: launches of kernels, copies, waits of the host. Candidates take
turns, one step each; a step is over when the GPU has done it. The ratio to DDP is taken within each round, and the
median over rounds is printed; so is how far the weights are from those of DDP after the same steps.

    python bench/gpu.py                    # all models; needs a CUDA device
    python bench/gpu.py --tasks gpt-25M --rounds 200
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from models import TASKS, Task
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline
from paceline.strategies import registry
from paceline.strategies.data_parallel.allreduce import AllReduce

Step = Callable[[], None]
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-4)
SETTINGS: dict[str, dict[str, Any]] = {
    "collective": {"reduction": "collective"},
    "collective, clipped": {"reduction": "collective", "clip_norm": 1.0},
    "exact": {"exact": True},
    "fixed point": {"exact": "fixed-point"},
}
WARM_UP = 10


def ddp(task: Task, data: TensorDataset, device: torch.device) -> tuple[nn.Module, Step]:
    """The plain loop over samples that are on the GPU already, in their order."""
    torch.manual_seed(0)
    model = DistributedDataParallel(task.build().to(device))
    optimizer = OPTIMIZER(model.parameters())
    size, place = task.microbatch * task.per_worker, 0

    def step() -> None:
        nonlocal place
        optimizer.zero_grad()
        features, target = (one[place : place + size] for one in data.tensors)
        task.loss(model(features), target).backward()
        optimizer.step()
        place = (place + size) % len(data)

    return model.module, step


def pace(task: Task, data: TensorDataset, steps: int, settings: dict[str, Any]) -> tuple[nn.Module, Step]:
    """The same with Paceline, by the strategy for several workers."""
    torch.manual_seed(0)
    model = task.build()
    batch = task.microbatch * task.per_worker
    sizes = {"batch": batch, "drop_last": True, "microbatches": task.per_worker if settings.get("exact") else 1}
    session = paceline.start(
        model=model, optimizer=OPTIMIZER, loss=task.loss, data=data, sampler=in_order(len(data)), **sizes, **settings
    )
    batches = session.batches(steps=steps)
    return model, lambda: session.step(next(batches)) and None


def in_order(samples: int) -> Callable[[int, int], range]:
    """The order of every epoch."""
    return lambda seed, epoch: range(samples)


def timed(step: Step) -> float:
    """Seconds until the GPU has done a step."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def distance(one: nn.Module, other: nn.Module) -> float:
    """Of the weights, relative."""
    mine, theirs = (torch.cat([value.detach().flatten() for value in held.parameters()]) for held in (one, other))
    return float((mine - theirs).norm() / theirs.norm())


def measure(task: Task, rounds: int, device: torch.device) -> None:
    """Print a line for each way of Paceline."""
    torch.manual_seed(1)
    cpu = task.data(task.microbatch * task.per_worker * 64)
    data = TensorDataset(*(one.to(device) for one in cpu.tensors))
    print(f"\n{task.name}, {rounds} rounds\n{'':24} {'ms':>8} {'DDP ms':>8} {'/ DDP':>8} {'weights off':>12}")
    for name, settings in SETTINGS.items():
        (theirs, their_step), (mine, step) = ddp(task, data, device), pace(task, data, rounds + WARM_UP, settings)
        seconds = [(timed(step), timed(their_step)) for _ in range(rounds + WARM_UP)]
        ours, others = ([1e3 * one for one in column] for column in zip(*seconds[WARM_UP:], strict=True))
        ratio = statistics.median(a / b for a, b in zip(ours, others, strict=True))
        times = f"{statistics.median(ours):8.2f} {statistics.median(others):8.2f} {ratio:8.3f}"
        print(f"{name:24} {times} {distance(mine, theirs):12.1e}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Step time on one GPU beside DDP.")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/gpu.py needs a CUDA device, and torch finds none here")
        return 2
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    registry.register("allreduce", replace(registry.entry_of("allreduce"), alone=AllReduce))  # it has no one to send to
    for task in options.tasks.split(","):
        measure(TASKS[task], options.rounds, device)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
