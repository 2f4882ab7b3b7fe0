"""Memory and time of a step with a divided state, beside all-reduce, ZeroRedundancyOptimizer and FSDP2 of torch.

A GPT of 10 M parameters with AdamW in float32, one microbatch for each worker, so that little communication is hidden
behind computation. The ways take turns in the same processes; a time is the median of the steps of all rounds on the
slowest worker. Memory is the proportional set size (PSS) of a worker after the last step, without what it had before
the model was made, in processes that train in one way only; the state of the optimizer is a part of it.

    python bench/sharded.py [workers] [rounds]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paceline.testing.ranks import run

SCRIPT = f"""
import gc, json, os, re, sys, time
from functools import partial
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
import paceline

sys.path.insert(0, {str(Path(__file__).parent)!r})
from models import CHARACTERS, CONTEXT, GPT

WARM, STEPS, ROWS = 3, 8, 1
workers, rank, rounds = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), int(os.environ["ROUNDS"])
torch.manual_seed(1)
tokens = torch.randint(0, CHARACTERS, (ROWS * workers * (WARM + STEPS), CONTEXT))
adamw = partial(torch.optim.AdamW, lr=1e-4, foreach=True)

def model():
    torch.manual_seed(0)
    return GPT(320, 8)

def megabytes():
    return int(re.search(r"Pss: +(\\d+)", open("/proc/self/smaps_rollup").read())[1]) / 1e3

def bytes_of(optimizer):
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in values)

def loss(output, target):
    return cross_entropy(output.flatten(0, -2), target.flatten())

def ours(strategy, **more):
    session = paceline.start(
        model=model(), optimizer=adamw, loss=loss, data=TensorDataset(tokens, tokens), batch=ROWS * workers,
        microbatches=workers, strategy=strategy, threads=1, timeout_seconds=120, audit="off", **more,
    )
    for batch in session.batches(steps=WARM + STEPS):
        yield partial(session.step, batch), session._context.update.optimizer

def torchs(zero=False, fsdp=False):
    net = model()
    if fsdp:
        for part in (*net.blocks, net):
            fully_shard(part)
    wrapped = net if fsdp else DistributedDataParallel(net)
    make = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW) if zero else torch.optim.AdamW
    optimizer = make(net.parameters(), lr=1e-4, foreach=True)
    def step(rows):
        optimizer.zero_grad()
        loss(wrapped(rows), rows).backward()
        optimizer.step()
    for number in range(WARM + STEPS):
        yield partial(step, tokens[(number * workers + rank) * ROWS :][:ROWS]), optimizer.optim if zero else optimizer

WAYS = {{
    "all-reduce": lambda: ours("allreduce"),
    **{{f"sharded: {{one}}": partial(ours, "sharded", shard=one) for one in ("parameters", "gradients", "optimizer")}},
    "sharded: parameters, copied": partial(ours, "sharded", shard_copy=True),
    "DDP": torchs, "DDP, ZeroRedundancyOptimizer": partial(torchs, zero=True), "FSDP2": partial(torchs, fsdp=True),
}}
torch.set_num_threads(1)
names = os.environ["NAMES"].split(";")
found = {{name: {{"seconds": [], "memory": [], "state": []}} for name in names}}
torch.manual_seed(0)
paceline.start(model=torch.nn.Linear(1, 1), optimizer=adamw, loss=loss, data=tokens, batch=workers)  # the process group
for _ in range(rounds):
    for name in names:
        gc.collect()
        before = megabytes()
        for number, (act, optimizer) in enumerate(WAYS[name]()):
            begin = time.perf_counter()
            act()
            if number >= WARM:
                found[name]["seconds"].append(time.perf_counter() - begin)
            if number == WARM + STEPS - 1:
                found[name]["memory"].append(megabytes() - before)
                found[name]["state"].append(bytes_of(optimizer) / 1e6)
        del act, optimizer
print(json.dumps(found), flush=True)
"""


SHARDED = [f"sharded: {one}" for one in ("parameters", "gradients", "optimizer", "parameters, copied")]
NAMES = "all-reduce", *SHARDED, "DDP", "DDP, ZeroRedundancyOptimizer", "FSDP2"


def measure(workers: int, rounds: int, names: Sequence[str]) -> list[dict[str, dict[str, list[float]]]]:
    """What each worker measured, by way."""
    environment = {"ROUNDS": str(rounds), "NAMES": ";".join(names)}
    with tempfile.TemporaryDirectory() as folder:
        everyone = run(SCRIPT, workers, Path(folder), environment=environment, deadline=900)
    if any(one.code for one in everyone):
        raise SystemExit("\n".join(one.err for one in everyone))
    return [json.loads(one.out.splitlines()[-1]) for one in everyone]


def main() -> None:
    workers, rounds = (int(word) for word in (sys.argv[1:] + ["2", "3"][len(sys.argv) - 1 :])[:2])
    timed = measure(workers, rounds, NAMES)
    seconds = {name: max(statistics.median(one[name]["seconds"]) for one in timed) for name in NAMES}
    print(f"{workers} workers, {rounds} rounds      step over all-reduce   memory (MB)   optimizer state (MB)")
    for name, value in seconds.items():
        alone = measure(workers, 1, [name])
        memory, state = (max(one[name][key][0] for one in alone) for key in ("memory", "state"))
        print(f"{name:30} {value * 1e3:8.1f} ms {value / seconds['all-reduce']:6.2f} {memory:13.0f} {state:14.1f}")


if __name__ == "__main__":
    main()
