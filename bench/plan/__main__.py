"""Predicted and measured seconds of a step on machines with slow links, for layers that sleep.

Each worker is a network namespace whose link is shaped. ``paceline.plan`` measures the same script on one worker, and
predicts each configuration. So two cores are enough for up to eight workers.

    python bench/plan                                  # as root
    python bench/plan --workers 2,4 --rates 200 --strategies allreduce,pipeline
    python bench/plan --workers 4 --slow 2 --strategies stealing,allreduce    # the last machine computes half as fast
    python bench/plan --workers 4 --inside 2 --strategies allreduce,sharded   # two machines with two workers each
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # before torch is imported
sys.path.append(str(Path(__file__).resolve().parent.parent / "machines"))
import train
from namespaces import network, obstacle

from paceline.cli.report import run_quietly
from paceline.launchers.base import Request
from paceline.planning.search import Candidate, candidates
from paceline.planning.trials import layout_of, measure, settings_text

SCRIPT = Path(__file__).resolve().with_name("train.py")
MODELS: dict[str, dict[str, Any]] = {
    "few weights": {"width": 256, "batch": 32, "layers": [[0.5, 1.0]] * 8},
    "even": {"width": 64, "batch": 32, "layers": [[2, 1.0]] * 8},
    "many weights at the end": {"width": 64, "batch": 32, "layers": [[0.25, 2.0]] * 6 + [[8, 0.2]] * 2},
}


def measured(names: list[str], one: Candidate, given: dict[str, Any], rounds: int) -> float:
    """Return the median seconds of a step in these namespaces."""
    settings = {**given["settings"], "strategy": one.strategy, **one.settings}
    found = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            run(names, {**given, "settings": settings}, Path(folder))
            of_workers = [json.loads(path.read_text())["seconds"] for path in Path(folder).glob("*.json")]
        if one.meets:
            found.append(statistics.median(max(step) for step in zip(*of_workers, strict=True)))
        else:
            found.append(max(map(statistics.fmean, of_workers)))
    return statistics.median(found)


def run(names: list[str], given: dict[str, Any], folder: Path) -> None:
    """Run workers in each namespace, as forks of this process."""
    context, workers = multiprocessing.get_context("fork"), len(names) * given["inside"]
    running = [context.Process(target=work, args=(names, rank, given, folder)) for rank in range(workers)]
    try:
        for process in running:
            process.start()
        for process in running:
            process.join(600)
            if process.exitcode != 0:
                raise SystemExit(f"a worker has ended with exit code {process.exitcode}")
    finally:
        for process in running:
            process.kill()


def work(names: list[str], rank: int, given: dict[str, Any], folder: Path) -> None:
    """Train in a namespace."""
    inside = given["inside"]
    at, local = divmod(rank, inside)
    with open(f"/run/netns/{names[at]}") as namespace:
        ctypes.CDLL(None).setns(namespace.fileno(), 0)
    if at == len(names) - 1:
        given = {**given, "layers": [[size, given["slow"] * ms] for size, ms in given["layers"]]}
    os.environ |= {
        **{"RANK": str(rank), "WORLD_SIZE": str(len(names) * inside)},
        **{"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(inside)},
        **{"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29412", "GLOO_SOCKET_IFNAME": "eth0"},
    }
    train.main(given, folder)


def main() -> None:
    """Print a line for each configuration, then the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--rates", default="1000,200", help="of the links, in Mbit/s")
    parser.add_argument("--strategies", default="allreduce,sharded,pipeline,diloco")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--inside", type=int, default=1, help="workers of each machine")
    parser.add_argument("--slow", type=float, default=1.0, help="how much longer the last machine computes")
    parser.add_argument("--realtime", action="store_true", help="workers go before all other programs of the machine")
    options = parser.parse_args()
    if missing := obstacle():
        raise SystemExit(f"left out, as {missing}")
    errors, wanted = [], options.strategies.split(",")
    for name in options.models.split(","):
        given = {**MODELS[name], "settings": {"microbatches": 8}, "realtime": options.realtime}
        given |= {"slow": options.slow, "inside": options.inside}
        found = measure(Request(SCRIPT, (json.dumps(given),)), [1, 2], os.cpu_count() or 1, run_quietly)
        for rate in map(float, options.rates.split(",")):
            for workers in map(int, options.workers.split(",")):
                machines, rest = divmod(workers, options.inside)
                if rest:
                    parser.error(f"{workers} workers cannot be divided into machines with {options.inside} each")
                speeds = [1.0] * (machines - 1) + [1 / options.slow]
                layout = layout_of(os.cpu_count() or 1, workers, [rate], 0.2, None, speeds)
                layout = replace(layout, per_machine=options.inside)
                tried = candidates(found, layout, [workers], exact=False, convergent=True)
                with network(machines, f"{rate:g}mbit") as names:
                    for one in [each for each in tried if each.strategy in wanted]:
                        took = measured(names, one, given, options.rounds)
                        errors.append(one.step_seconds / took - 1)
                        times = f"predicted {1000 * one.step_seconds:7.1f} ms  measured {1000 * took:7.1f} ms"
                        text = " ".join(settings_text(one).values())[:40]
                        print(
                            f"{name:24} {rate:5g} Mbit/s  {workers} workers  {text:40} {times}  {errors[-1]:+.1%}",
                            flush=True,
                        )
    size = sorted(map(abs, errors))
    worst = size[len(size) * 9 // 10]
    print(f"{len(size)} configurations: mean error {statistics.mean(size):.1%}, 90th percentile {worst:.1%}")


if __name__ == "__main__":
    main()
