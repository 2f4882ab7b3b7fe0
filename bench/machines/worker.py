"""One worker: trains a perceptron in one way, and tells its step times and the bytes of its machine's link."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import paceline

sys.path.append(str(Path(__file__).parents[1]))
from few_bytes import SETTINGS
from models import CHARACTERS, GPT, loss_of_characters

from paceline.comm.reduction.choice import reduction_for
from paceline.schedule.tree import Node

WARM = 3
BITS_BATCH = 16
"""Samples of a batch that is the same on all layouts: as many as there are workers on the largest."""
OPTIMIZER = partial(torch.optim.SGD, lr=1e-3)
PER_WORKER = int(os.environ.get("PER_WORKER", "2"))
"""Samples of a worker in a step, with formats on the wire and with replicas."""
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
        model=model, data=data, batch=batch, **{"optimizer": OPTIMIZER, "loss": mse_loss, "microbatches": batch} | way
    )
    batches = session.batches(steps=WARM + steps)
    for step in range(WARM + steps):
        begin = time.perf_counter()
        session.step(next(batches))
        seconds.append(time.perf_counter() - begin)
        if step in (WARM - 1, WARM + steps - 1):  # in between, workers wait for each other only in their steps
            mark(step)
    next(batches, None)  # the end of the batches, where the workers hash what they have in shares
    return seconds[WARM:], session.fingerprint()


def gloo_alone(megabytes: int, steps: int) -> list[float]:
    """An all-reduce of one tensor, and nothing else."""
    value = torch.ones(megabytes * 2**18)

    def reduce() -> None:
        dist.all_reduce(value)

    return timed(reduce, steps)


def tree_alone(
    model: nn.Module, data: torch.utils.data.Dataset[object], megabytes: int, steps: int, workers: int
) -> list[float]:
    """The same bytes as tensors of 1 MB through Paceline's reduction, one sum of each worker."""
    session = paceline.start(model=model, optimizer=OPTIMIZER, loss=mse_loss, data=data, batch=workers)
    world, events = session._context.world, session._context.events
    reduction = reduction_for(world, [torch.empty(2**18) for _ in range(megabytes)], events, "gradients")
    nodes = [[Node(0, rank)] for rank in range(world.size)]

    def reduce() -> None:
        reduction.begin(nodes, float(world.size))
        for member in range(reduction.members):
            reduction.slots(member)[0].fill_(1.0)
            reduction.written(member)
        reduction.finish()

    return timed(reduce, steps)


def timed(reduce: Callable[[], None], steps: int) -> list[float]:
    """The seconds of each reduction."""
    seconds = []
    for step in range(WARM + steps):
        begin = time.perf_counter()
        reduce()
        seconds.append(time.perf_counter() - begin)
        mark(step)
    return seconds[WARM:]


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
    shape = {"exact": True, "microbatches": 2 * size}
    if way == "ddp":
        dist.init_process_group("gloo")
        seconds = ddp(model, data, steps)
    elif way == "gloo alone":
        dist.init_process_group("gloo")
        seconds = gloo_alone(megabytes, steps)
    elif way == "tree alone":
        seconds = tree_alone(model, data, megabytes, steps, size)
    elif way.startswith("bits-"):
        kind = way.removeprefix("bits-")
        seconds, fingerprint = ours(model, data, steps, BITS_BATCH, exact=True if kind == "exact" else kind)
    elif way.startswith("sharded-"):
        shard, copied = way.removeprefix("sharded-").removesuffix("-copied"), way.endswith("-copied")
        stage = {"strategy": "sharded", "shard": shard, "shard_copy": copied}
        seconds, fingerprint = ours(model, data, steps, size, exact=True, **stage)
    elif way.startswith("wire-"):
        seconds, fingerprint = ours(model, data, steps, PER_WORKER * size, wire=way.removeprefix("wire-"), **shape)
    elif way.startswith("auto-"):
        chosen = {"communication": "auto", "tolerance": way.removeprefix("auto-")}
        seconds, fingerprint = ours(model, data, steps, PER_WORKER * size, **chosen, **shape)
    elif way.startswith("fixed-"):
        wire, megabytes_each = way.removeprefix("fixed-").split("@")
        each = None if megabytes_each == "none" else float(megabytes_each)
        seconds, fingerprint = ours(model, data, steps, PER_WORKER * size, wire=wire, bucket_megabytes=each, **shape)
    elif way.startswith("diloco-"):
        every, fragments, delay, wire = way.split("-")[1:]
        local = {"every": int(every), "fragments": int(fragments), "delay": int(delay), "replicas": size}
        seconds, fingerprint = ours(
            model, data, steps, PER_WORKER * size, strategy="diloco", local=local, wire=wire, **shape
        )
    elif way.startswith("gpt-"):
        text = torch.randint(CHARACTERS, (256, 9), generator=torch.Generator().manual_seed(1))
        data, model = torch.utils.data.TensorDataset(text[:, :-1], text[:, 1:]), GPT(320, 8)
        of_setting = {"strategy": "diloco"} | SETTINGS[way[4:]] if way[4:] in SETTINGS else {}
        seconds, fingerprint = ours(
            model, data, steps, size, loss=loss_of_characters, exact=True, audit="off", **of_setting
        )
    else:
        reduction = "collective" if way == "collective" else "auto"
        seconds, fingerprint = ours(model, data, steps, size, exact=way == "exact", reduction=reduction)
    found = {
        "seconds": seconds,
        "bytes": (counted[1] - counted[0]) / steps,
        "gradients": megabytes * 2**20 if "alone" in way else 4 * sum(value.numel() for value in model.parameters()),
        "fingerprint": fingerprint,
    }
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    together()
