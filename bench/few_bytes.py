"""Streaming DiLoCo and SparseLoCo beside all-reduce: loss after equal samples, and bytes on 4 workers.

The losses are those of one process with ``exact=True``, which has the bits of 1 to 4 workers: the loss of the whole
data set after all steps. All-reduce and the replicas have the same batches, learning rate and cosine schedule.

For the bytes, 4 workers in network namespaces train a GPT of 10 million parameters, and the kernel counts what leaves
a worker's link in a period, the most of all workers. For all-reduce it counts 4 steps.

    python bench/few_bytes.py
    python bench/few_bytes.py --tasks mlp --settings int4 --seeds 0
    python bench/few_bytes.py --tasks gpt --settings int4 --muon --steps 3076 --outer-lr 1 --outer-momentum 0.5
    python bench/few_bytes.py --links                       # as root
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from torch.utils.data import TensorDataset
from wire_losses import TASKS, gpt

import paceline

sys.path.insert(0, str(Path(__file__).with_name("machines")))
from launched import run
from namespaces import network, obstacle

WORKERS = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "int4": {
        "wire": "int4",
        "local": {"every": 64, "fragments": 4, "delay": 4, "outer_lr": 0.7, "outer_momentum": 0.9},
    },
    "topk-2bit": {
        "wire": "topk-2bit",
        "wire_ratio": 0.09,
        "local": {"every": 64, "delay": 4, "outer_lr": 2.0, "outer_momentum": 0.0},
    },
}
TRAINED = {"gpt": (8e-3, 1028, 16), "conv": (5e-2, 1028, 64), "mlp": (6e-3, 2052, 64)}
"""Learning rate, number of steps (a multiple of the periods, and the delay of the last fragment) and batch."""
MUON_RATE = 0.02
HELD = 1000
"""Samples of the text that are not trained on, with Muon."""


def muon(named_parameters: Iterable[tuple[str, nn.Parameter]], lr: float) -> dict[str, Optimizer]:
    """Muon for the matrices of the blocks of a GPT, and AdamW for the rest."""
    kinds: dict[bool, list[tuple[str, nn.Parameter]]] = {True: [], False: []}
    for name, value in named_parameters:
        kinds[name.startswith("blocks.") and value.ndim == 2].append((name, value))
    return {"muon": Muon(kinds[True], lr=MUON_RATE, weight_decay=0.01), "adamw": AdamW(kinds[False], lr=lr)}


def loss_of(task: str, seed: int, options: argparse.Namespace, **given: Any) -> float:
    """Train, and return the loss of the data set; with Muon, of text that follows what is trained, each part once."""
    rate, steps, batch = TRAINED[task]
    rate, steps = options.lr or rate, options.steps or steps
    torch.manual_seed(seed)
    found = TASKS[task]() | {"batch": batch}
    held, factory = found["data"], found["optimizer"]
    found["optimizer"] = partial(factory.func, **factory.keywords | {"lr": rate})
    if options.muon:
        found["optimizer"] = lambda named_parameters: muon(named_parameters, rate)
        rows = gpt(steps * batch + HELD)["data"]
        found["data"], held = TensorDataset(*rows[:-HELD]), TensorDataset(*rows[-HELD:])
    found["schedule"] = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=steps)
    session = paceline.start(**found, seed=seed, exact=True, microbatches=WORKERS, audit="off", **given)
    for batch in session.batches(steps=steps):
        session.step(batch)
    return float(session.evaluate(held))


def links(names: list[str]) -> None:
    """Print the bytes of a step with each setting, and the ratio of those of all-reduce to them."""
    with network(WORKERS, "1gbit") as machines, tempfile.TemporaryDirectory() as folder:
        plain = 0.0
        for name in ("allreduce", *names):
            period = SETTINGS[name]["local"]["every"] if name in SETTINGS else 4
            steps = period + 2  # in which what is sent at the end of the period lands
            everyone = run(machines, [1] * WORKERS, Path(folder) / name, f"gpt-{name}", 0, steps)
            crossed = max(one["bytes"] for one in everyone) * (steps / period if name in SETTINGS else 1.0)
            plain = plain or crossed
            print(f"{name:>10}  {crossed / 1e6:8.4f} MB a step  {plain / crossed:7.1f} times fewer", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, help="in place of those of the task")
    parser.add_argument("--lr", type=float, help="in place of that of the task")
    parser.add_argument("--muon", action="store_true", help="for the matrices of the GPT")
    parser.add_argument("--outer-lr", type=float, help="in place of that of the setting")
    parser.add_argument("--outer-momentum", type=float, help="in place of that of the setting")
    parser.add_argument("--links", action="store_true", help="count bytes in place of losses")
    options = parser.parse_args()
    if options.muon and options.tasks != "gpt":
        parser.error("--muon needs --tasks gpt")
    torch.set_num_threads(1)
    names = options.settings.split(",")
    if options.links:
        if missing := obstacle():
            raise SystemExit(f"left out, as {missing}")
        links(names)
        return
    outer = {key: value for key in ("outer_lr", "outer_momentum") if (value := getattr(options, key)) is not None}
    for task in options.tasks.split(","):
        for seed in map(int, options.seeds.split(",")):
            plain = loss_of(task, seed, options, strategy="single")
            print(f"{task:>5}  seed {seed}  {'allreduce':>10}  {plain:.4f}", flush=True)
            for name in names:
                setting = SETTINGS[name] | {"local": SETTINGS[name]["local"] | outer}
                found = loss_of(task, seed, options, strategy="diloco", **setting)
                print(f"{task:>5}  seed {seed}  {name:>10}  {found:.4f}  {found / plain - 1:+.1%}", flush=True)


if __name__ == "__main__":
    main()
