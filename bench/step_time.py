"""Step time of Paceline beside raw DistributedDataParallel, Accelerate and Lightning Fabric.

One of Paceline's variants and the others live in the same worker processes and take turns, one step each, so that a
noisy machine treats them alike; the ratio is taken within each round, and the median over rounds is printed. A variant
has processes of its own, because sessions on several workers train one after the other. Each step loads its batch,
computes, averages and updates. ``accumulating`` computes the same microbatches as ``exact``; ``one pass`` computes a
worker's share at once.

    python bench/step_time.py                    # all models, 2 workers
    python bench/step_time.py --tasks mlp-2M --rounds 200
    python bench/step_time.py --no-peers --checkout . --checkout ../before    # the code of two checkouts in turns
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from models import TASKS, Task
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import paceline

Step = Callable[[], None]
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-4)


def forever(loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of one epoch after the other."""
    for epoch in count():
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        yield from loader


def loader_of(task: Task, data: Any, size: int) -> DataLoader[Any]:
    return DataLoader(data, batch_size=size, sampler=DistributedSampler(data), drop_last=True)


def ddp(task: Task, data: Any, accumulating: bool) -> Step:
    """The plain loop of a DistributedDataParallel script."""
    torch.manual_seed(0)
    model = DistributedDataParallel(task.build())
    optimizer = OPTIMIZER(model.parameters())
    parts = task.per_worker if accumulating else 1
    batches = forever(loader_of(task, data, task.microbatch * task.per_worker // parts))

    def step() -> None:
        optimizer.zero_grad()
        for part in range(parts):
            features, target = next(batches)
            model.require_backward_grad_sync = part == parts - 1
            (task.loss(model(features), target) / parts).backward()
        optimizer.step()

    return step


def pace(task: Task, data: Any, **settings: Any) -> Step:
    """The same with Paceline."""
    torch.manual_seed(0)
    batch = task.microbatch * task.per_worker * dist.get_world_size()
    session = paceline.start(
        model=task.build(),
        optimizer=OPTIMIZER,
        loss=task.loss,
        data=data,
        batch=batch,
        drop_last=True,
        threads=1,
        **settings,
    )
    batches = session.batches(epochs=1_000_000)
    return lambda: session.step(next(batches)) and None


def accelerate(task: Task, data: Any) -> Step:
    """The same with Accelerate."""
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = task.build()
    model, optimizer = accelerator.prepare(model, OPTIMIZER(model.parameters()))
    batches = forever(loader_of(task, data, task.microbatch * task.per_worker))

    def step() -> None:
        optimizer.zero_grad()
        features, target = next(batches)
        accelerator.backward(task.loss(model(features), target))
        optimizer.step()

    return step


def fabric(task: Task, data: Any) -> Step:
    """The same with Lightning Fabric."""
    from lightning_fabric import Fabric

    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    model = task.build()
    model, optimizer = fabric.setup(model, OPTIMIZER(model.parameters()))
    batches = forever(loader_of(task, data, task.microbatch * task.per_worker))

    def step() -> None:
        optimizer.zero_grad()
        features, target = next(batches)
        fabric.backward(task.loss(model(features), target))
        optimizer.step()

    return step


VARIANTS = {"fast": False, "fast, microbatches": False, "exact": True, "fixed point": "fixed-point"}
"""Of Paceline, with its setting ``exact``."""


def candidates(task: Task, data: Any, variant: str, peers: bool) -> dict[str, Step]:
    """All that take turns, by name."""
    microbatches = {} if variant == "fast" else {"microbatches": task.per_worker * dist.get_world_size()}
    found = {
        "DDP, one pass": ddp(task, data, accumulating=False),
        "DDP, accumulating": ddp(task, data, accumulating=True),
        f"paceline, {variant}": pace(task, data, exact=VARIANTS[variant], **microbatches),
    }
    if peers:
        found["Accelerate, one pass"] = accelerate(task, data)
        found["Fabric, one pass"] = fabric(task, data)
    return found


def measure(task: Task, rounds: int, variant: str, peers: bool) -> dict[str, list[float]]:
    """Seconds of each step of each candidate; the first rounds warm up and are left out."""
    torch.manual_seed(0)
    data = task.data(task.microbatch * task.per_worker * dist.get_world_size() * 64)
    steps = candidates(task, data, variant, peers)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(rounds + 3):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            begin = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - begin)
    return {name: values[3:] for name, values in seconds.items()}


def show(task: Task, seconds: dict[str, list[float]]) -> None:
    """One line for each candidate: its median, and its ratios to DDP."""
    print(f"\n{task.name}, {dist.get_world_size()} workers, {len(seconds['DDP, one pass'])} rounds")
    print(f"{'':30} {'median ms':>10} {'/ DDP one pass':>15} {'/ DDP accumulating':>19}")
    for name, values in seconds.items():
        ratios = [
            statistics.median(a / b for a, b in zip(values, seconds[base], strict=True))
            for base in ("DDP, one pass", "DDP, accumulating")
        ]
        print(
            f"{name:30} {1e3 * statistics.median(values):10.2f} {ratios[0]:15.3f} {ratios[1]:19.3f}",
            flush=True,
        )


def work(options: argparse.Namespace) -> None:
    """What each worker does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rounds = options.rounds if options.tasks.startswith("mlp") else max(options.rounds // 10, 5)
    seconds = measure(TASKS[options.tasks], rounds, options.variant, options.peers)
    if dist.get_rank() == 0:
        show(TASKS[options.tasks], seconds)
    dist.destroy_process_group()


def launch(options: argparse.Namespace, task: str, variant: str, checkout: str) -> int:
    """Measure one variant of one checkout in processes of its own."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.workers)]
    words = [__file__, "--tasks", task, "--variant", variant, "--rounds", str(options.rounds)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if checkout:
        print(f"\nPaceline of {checkout}:", flush=True)
        environment["PYTHONPATH"] = os.path.abspath(checkout)
    peers = [] if options.peers else ["--no-peers"]
    return subprocess.run([sys.executable, *launcher, *words, *peers], env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Step time beside raw DDP and others.")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="of Paceline; all if none is named")
    parser.add_argument("--checkout", action="append", default=[], help="whose Paceline to measure; several in turns")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave out Accelerate and Fabric")
    options = parser.parse_args()
    if "RANK" in os.environ:
        (options.variant,) = options.variant
        work(options)
        return 0
    return max(
        launch(options, task, variant, checkout)
        for task in options.tasks.split(",")
        for variant in options.variant or VARIANTS
        for checkout in options.checkout or [""]
    )


if __name__ == "__main__":
    sys.exit(main())
