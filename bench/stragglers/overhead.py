"""Cost of stealing when no worker is slow: stealing and all-reduce alternate, each in sessions of a few steps.

Measured twice: with emulated computing, as everywhere here, and with a real perceptron on as many workers as the
machine has cores. In each round both have a session in the same processes, and they begin in turn. The ratio is that of
the median steps of a round. Prints the median of all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from patterns import Pattern
from runs import HERE

from paceline.testing.ranks import run

ASLEEP = {"rounds": 7, "steps": 6, "microbatches": 16, "samples": 2, "width": 32, "inputs": 16, "seconds": 0.02}
AWAKE = {"rounds": 18, "steps": 16, "microbatches": 16, "samples": 64, "width": 512, "inputs": 256, "seconds": 0.0}
WARM = 8
"""First steps of a session, which are left out: until the shares have had their chance to follow the speeds."""
STRATEGIES = "allreduce", "stealing"


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The ratios of stealing to all-reduce."""
    print("\nstealing over all-reduce when no worker is slow, median of the ratios of rounds (quartiles)")
    cores = len(os.sched_getaffinity(0))
    results = {}
    for name, case, workers in (("asleep", ASLEEP, options.workers), ("computing", AWAKE, cores)):
        home = folder / f"overhead-{name}"
        home.mkdir()
        case = {**case, "rounds": options.rounds or case["rounds"]}
        ended = run(Path(__file__), workers, home, environment={"STRAGGLERS_CASE": json.dumps(case)}, deadline=600)
        assert ended[0].code == 0, ended[0].err
        pairs = json.loads(ended[0].out.splitlines()[-1])
        ratios = [steal / plain for plain, steal in pairs]
        low, middle, high = quantiles(ratios, n=4)
        plain = median(pair[0] for pair in pairs)
        results[name] = {"workers": workers, "ratio": middle, "quartiles": [low, high], "allreduce_seconds": plain}
        print(
            f"{name:10} {workers} workers, {1e3 * plain:.1f} ms a step: {middle:.4f} ({low:.4f} to {high:.4f}), "
            f"{len(ratios)} rounds",
            flush=True,
        )
    return results


def work(case: dict[str, Any]) -> None:
    """What each worker does."""
    import time
    from functools import partial

    import torch
    import torch.distributed as dist
    from worker import Emulation, at_end_of_backward, sharpen_sleep, sleep_until

    import paceline

    sharpen_sleep()
    torch.manual_seed(0)
    workers = int(os.environ["WORLD_SIZE"])
    size = case["samples"] * case["microbatches"] * workers
    inputs = torch.randn(8 * size, case["inputs"])
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1))
    emulation = Emulation(Pattern("none", workers), case["seconds"], None)

    def forward(model: torch.nn.Module, microbatch: Any) -> Any:
        begin, seconds = time.monotonic(), emulation.seconds()
        loss = torch.nn.functional.cross_entropy(model(microbatch[0]), microbatch[1])
        if seconds:
            loss.register_hook(lambda _: at_end_of_backward(lambda: sleep_until(begin + seconds)))
            sleep_until(begin + seconds / 3)
        return loss

    def seconds_of(strategy: str) -> float:
        """The median step of a session."""
        width, seconds = case["width"], []
        session = paceline.start(
            model=torch.nn.Sequential(
                torch.nn.Linear(case["inputs"], width),
                torch.nn.Tanh(),
                torch.nn.Linear(width, width),
                torch.nn.Tanh(),
                torch.nn.Linear(width, 4),
            ),
            optimizer=partial(torch.optim.SGD, lr=0.01),
            forward=forward,
            data=data,
            batch=size,
            microbatches=case["microbatches"] * workers,
            threads=1,
            strategy=strategy,
        )
        for batch in session.batches(steps=WARM + case["steps"]):
            dist.barrier()
            begin = time.perf_counter()
            session.step(batch)
            seconds.append(time.perf_counter() - begin)
        return median(seconds[WARM:])

    pairs = []
    for turn in range(case["rounds"]):
        took = {strategy: seconds_of(strategy) for strategy in STRATEGIES[:: -1 if turn % 2 else 1]}
        pairs.append([took[strategy] for strategy in STRATEGIES])
    if os.environ["RANK"] == "0":
        print(json.dumps(pairs), flush=True)
    dist.barrier()


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    work(json.loads(os.environ["STRAGGLERS_CASE"]))
