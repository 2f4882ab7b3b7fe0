"""Step time of ``paceline.horovod``'s DistributedOptimizer beside raw DistributedDataParallel.

Both train the same model in the same worker processes and take turns, one step each, in changing order, so that a noisy
machine treats them alike; the median of the ratios of all rounds is printed. Both must end with the same weights.

    paceline run -n 2 bench/horovod.py                       # an MLP of 2 M parameters, a GPT of 10 M
    paceline run -n 2 bench/horovod.py --tasks mlp-2M --rounds 200
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from models import TASKS, Task
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline.horovod.torch as hvd

_WARM_UP = 5
_BATCHES = 4


def candidate(
    task: Task, data: list[tuple[torch.Tensor, ...]], horovod: bool
) -> tuple[nn.Module, Callable[[int], None]]:
    """A model and a step of it."""
    torch.manual_seed(0)
    model = task.build() if horovod else DistributedDataParallel(task.build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if horovod:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def step(turn: int) -> None:
        optimizer.zero_grad()
        features, target = data[(turn + hvd.rank()) % _BATCHES]
        task.loss(model(features), target).backward()
        optimizer.step()

    return model, step


def measure(task: Task, rounds: int) -> None:
    """Print the medians of both."""
    size = task.microbatch * task.per_worker
    whole = task.data(size * _BATCHES).tensors
    data = list(zip(*(one.split(size) for one in whole), strict=True))
    made = {name: candidate(task, data, horovod=name == "horovod") for name in ("DDP", "horovod")}
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(rounds + _WARM_UP):
        for name in sorted(made, reverse=turn % 2 == 1):
            dist.barrier()
            begin = time.perf_counter()
            made[name][1](turn)
            seconds[name].append(time.perf_counter() - begin)
    pairs = list(zip(seconds["DDP"], seconds["horovod"], strict=True))[_WARM_UP:]
    weights = [list(model.parameters()) for model, _ in made.values()]
    same = all(map(torch.equal, *weights))
    if hvd.rank() == 0:
        medians = [1000 * statistics.median(column) for column in zip(*pairs, strict=True)]
        ratio = statistics.median(ours / theirs for theirs, ours in pairs)
        print(
            f"{task.name}: DDP {medians[0]:.1f} ms, horovod {medians[1]:.1f} ms, ratio {ratio:.3f}, same weights {same}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", default=["mlp-2M", "gpt-10M"], choices=TASKS)
    parser.add_argument("--rounds", type=int, default=100)
    given = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    for name in given.tasks:
        measure(TASKS[name], given.rounds)


if __name__ == "__main__":
    main()
