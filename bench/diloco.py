"""DiLoCo beside all-reduce: the loss after equal samples, and bytes and seconds of a step over slow links.

The losses are those of one process with ``exact=True``, which has the bits of any number of workers: the loss of the
whole data set after the last outer step, relative to all-reduce with the same batches. The table has the mean of the
seeds, and the largest of them.

For bytes and seconds the workers are network namespaces whose links are shaped, as in ``bench/wire.py``. The kernel
counts the bytes on a worker's link, the most of all workers.

    python bench/diloco.py
    python bench/diloco.py --tasks mlp --every 32 --wires float32 --seeds 1
    python bench/diloco.py --tasks mlp --every 32 --wires float32 --microbatches 16 --replicas 16
    python bench/diloco.py --tasks mlp --every 32 --wires float32 --adaptive
    python bench/diloco.py --tasks gpt --strategies diloco --every 32 --wires float32 --steps 1280 --after 320 \
        --lr 8e-3 --cosine
    python bench/diloco.py --links                          # as root
    PER_WORKER=64 python bench/diloco.py --links --every 120 --wires int4 --fragments 5 --delay 8
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from wire_losses import TASKS

import paceline

sys.path.insert(0, str(Path(__file__).with_name("machines")))
from launched import run
from namespaces import network, obstacle

OF_TRAINING = ("steps", "lr", "cosine", "microbatches")
LOCAL = ("outer_lr", "outer_momentum", "after", "replicas", "adaptive", "fragments", "delay", "mixing")
"""Options that are arguments of :func:`loss_of`, and settings ``local.*``."""


def loss_of(task: str, seed: int, steps: int, lr: float | None, cosine: bool, microbatches: int, **more: Any) -> float:
    """Train, and return the loss of the data set."""
    torch.manual_seed(seed)
    given = TASKS[task]()
    if lr is not None:
        given["optimizer"] = partial(torch.optim.AdamW, lr=lr)
    if cosine:
        given["schedule"] = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=steps)
    session = paceline.start(**given, seed=seed, exact=True, microbatches=microbatches, audit="off", **more)
    for batch in session.batches(steps=steps):
        session.step(batch)
    return float(session.evaluate(given["data"]))


def links(rate: str, workers: int, ways: list[tuple[str, int]], megabytes: int) -> None:
    """Print a line for all-reduce and for each period and format, on links of a rate.

    The first way sends nothing: its seconds are those of computing, while all workers share this machine's cores.
    """
    first: tuple[float, float] | None = None
    alone = 0.0
    with network(workers, rate) as names, tempfile.TemporaryDirectory() as folder:
        for way, steps in ways:
            everyone = run(names, [1] * workers, Path(folder) / way, way, megabytes, steps)
            crossed, seconds = max(one["bytes"] for one in everyone), statistics.fmean(everyone[0]["seconds"])
            if not alone:
                alone = seconds
                continue
            first = first or (crossed, seconds)
            print(
                f"{workers} workers, {rate:>8}  {way:>22}  {crossed / 1e6:7.3f} MB a step, {first[0] / crossed:6.1f} "
                f"times fewer  {seconds:6.3f} s a step, {first[1] / seconds:5.1f} times faster, "
                f"{alone / seconds:4.0%} of it computing",
                flush=True,
            )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--every", default="8,32")
    parser.add_argument("--wires", default="float32,int8,int4")
    parser.add_argument("--strategies", default="local-sgd,diloco")
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--lr", type=float, help="of AdamW, in place of that of the task")
    parser.add_argument("--cosine", action="store_true", help="let the learning rate fall to 0, as a cosine")
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--after", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--adaptive", action="store_true", help="let the periods get shorter as the loss falls")
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--delay", type=int, default=0)
    parser.add_argument("--mixing", type=float, default=0.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--links", action="store_true", help="measure bytes and seconds in place of losses")
    parser.add_argument("--rates", default="1gbit,100mbit", help="of the links, as tc writes them")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=20, help="of weights")
    options = parser.parse_args()
    torch.set_num_threads(1)
    periods, wires = [int(one) for one in options.every.split(",")], options.wires.split(",")
    if options.links:
        if missing := obstacle():
            raise SystemExit(f"left out, as {missing}")
        alone, cut = 1_000_000, f"{options.fragments}-{options.delay}"
        ways = [(f"diloco-{alone}-1-0-float32", 16), ("wire-float32", 8)]
        ways += [(f"diloco-{every}-{cut}-{wire}", 2 * every) for every in periods for wire in wires]
        for rate in options.rates.split(","):
            links(rate, options.workers, ways, options.megabytes)
        return
    for task in options.tasks.split(","):
        train = partial(loss_of, task, **{key: getattr(options, key) for key in OF_TRAINING})
        plain = [train(seed) for seed in range(options.seeds)]
        print(f"{task:>5}  {'allreduce':>9}  {statistics.fmean(plain):.4f}", flush=True)
        for strategy in options.strategies.split(","):
            for every in periods:
                for wire in wires if strategy == "diloco" else wires[:1]:
                    local = {"every": every, **{key: getattr(options, key) for key in LOCAL}}
                    found = [train(seed, strategy=strategy, wire=wire, local=local) for seed in range(options.seeds)]
                    over = [one / base - 1 for one, base in zip(found, plain, strict=True)]
                    print(
                        f"{task:>5}  {strategy:>9}  every {every:3}  {wire:>8}  {statistics.fmean(over):+.1%}  largest "
                        f"{max(over, key=abs):+.1%}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
