"""A model of many weights and few activations over slow links, compared with DistributedDataParallel.

Each worker has a network namespace of its own; all are joined by a bridge, and each one's link carries 200 Mbit/s in
each direction. The same model, batch and learning rate; every step sees the same samples, so the losses of the
synchronous pipeline are those of DistributedDataParallel up to rounding.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from launched import HERE, RunFailed, results_of
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import paceline

sys.path.append(str(HERE.parent / "machines"))

from namespaces import network, obstacle, within

RATE = "200mbit"
SAMPLES, STEPS, WARM = 128, 6, 2
MICROBATCHES = 8
OPTIMIZER = partial(torch.optim.SGD, lr=0.01)
DEADLINE = 300.0


def model_of(workers: int) -> nn.Sequential:
    """Like VGG: convolutions with few weights, then large linear layers; as many of these as make stages alike."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 2048),
        nn.ReLU(),
    ]
    for _ in range(workers - 1):
        layers += [nn.Linear(2048, 2048), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2048, 10))


def cut_of(workers: int) -> tuple[str, ...]:
    """A stage begins with each of the large linear layers but the first."""
    return tuple(str(9 + 2 * place) for place in range(workers - 1))


def work(given: dict[str, Any]) -> list[dict[str, Any]]:
    """DistributedDataParallel and two pipelines, in turns."""
    workers = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 3, 16, 16), torch.randint(10, (SAMPLES,)))
    dist.init_process_group("gloo")
    found = [theirs(data, workers), *(ours(data, workers, schedule) for schedule in ("1f1b", "pipedream"))]
    dist.destroy_process_group()
    return found


def theirs(data: torch.utils.data.TensorDataset, workers: int) -> dict[str, Any]:
    """DistributedDataParallel."""
    each = SAMPLES // workers
    pictures, kinds = (tensor[dist.get_rank() * each :][:each] for tensor in data.tensors)
    model = DistributedDataParallel(model_of(workers), bucket_cap_mb=5)
    optimizer = OPTIMIZER(model.parameters())
    seconds, losses = [], []
    for _ in range(WARM + STEPS):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = cross_entropy(model(pictures), kinds)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.detach())
    means = torch.stack(losses)
    dist.all_reduce(means)
    return {"name": "DistributedDataParallel", "seconds": seconds[WARM:], "losses": (means / workers).tolist()}


def ours(data: torch.utils.data.TensorDataset, workers: int, schedule: str) -> dict[str, Any]:
    """A pipeline."""
    session = paceline.start(
        model=model_of(workers),
        optimizer=OPTIMIZER,
        loss=cross_entropy,
        data=data,
        batch=SAMPLES,
        microbatches=MICROBATCHES,
        strategy="pipeline",
        pipeline={"schedule": schedule, "cut": cut_of(workers)},
        threads=1,
        timeout_seconds=120,
    )
    seconds, losses = [], []
    begin = time.perf_counter()
    steps = STEPS * 3
    for batch in session.batches(steps=WARM + steps):
        losses.append(session.step(batch).loss)
        seconds.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    return {"name": f"pipeline, {schedule}", "seconds": seconds[WARM:], "losses": losses}


def measure(folder: Path, options: Namespace) -> dict[str, Any]:
    """Print the table; the numbers."""
    missing = obstacle()
    if missing:
        print(f"\nlink: left out, as {missing}")
        return {"left out": missing}
    results: dict[str, Any] = {}
    for workers in map(int, options.ranks.split(",")):
        home = folder / f"link-{workers}"
        home.mkdir()
        (home / "given.json").write_text("{}")
        with network(workers, RATE) as names:
            drops = run_in(names, home)
        everyone = results_of(home, workers)
        weights = sum(weight.numel() for weight in model_of(workers).parameters())
        print(
            f"\n{workers} workers, links of 200 Mbit/s, {weights / 1e6:.1f} million weights, {SAMPLES} samples a step; "
            f"{drops} packets dropped"
        )
        print(f"{'':24} {'ms a step':>10} {'samples/s':>10} {'x DDP':>7} {'first losses':>22}")
        for place, one in enumerate(everyone[0]):
            slowest = [max(values) for values in zip(*(worker[place]["seconds"] for worker in everyone), strict=True)]
            base = results.setdefault(str(workers), {}).get("DistributedDataParallel", {"seconds": median(slowest)})
            results[str(workers)][one["name"]] = {"seconds": median(slowest), "losses": one["losses"]}
            print(
                f"{one['name']:24} {1e3 * median(slowest):10.1f} {SAMPLES / median(slowest):10.1f} "
                f"{base['seconds'] / median(slowest):7.2f} " + " ".join(f"{loss:.6f}" for loss in one["losses"][:4])
            )
    return results


def run_in(names: list[str], home: Path) -> int:
    """Run the workers, each in its namespace, and return the number of packets that their links have dropped.

    Raises:
        RunFailed: with the end of what a worker printed.
    """
    with contextlib.ExitStack() as stack:
        running = []
        for rank, name in enumerate(names):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(names)),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": "29411",
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
            }
            output = stack.enter_context((home / f"output-{rank}").open("w"))
            command = ["ip", "netns", "exec", name, sys.executable, str(HERE / "worker.py"), "link", str(home)]
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            stack.callback(process.wait)
            stack.callback(process.kill)
            running.append(process)
        end = time.monotonic() + DEADLINE
        while any(process.poll() is None for process in running):
            failed = next((rank for rank, process in enumerate(running) if process.poll()), None)
            if failed is not None or time.monotonic() > end:
                rank = failed or 0
                raise RunFailed(f"link: worker {rank}\n{(home / f'output-{rank}').read_text()[-3000:]}")
            time.sleep(0.1)
    stated = [json.loads(within(name, "tc", "-s", "-j", "qdisc", "show", "dev", "eth0")) for name in names]
    return sum(int(qdisc.get("drops", 0)) for one in stated for qdisc in one)
