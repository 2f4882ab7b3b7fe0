"""Steps that really compute: each worker in a control group of its own, whose CPU quota is its speed.

For the patterns that do not change. The ideal is the CPU time of the step's microbatches, as one worker alone without a
quota needs it, over the sum of the quotas. Needs the right to make control groups (as root, on a machine or in a
container that lets its root do so), version 1 or 2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from measures import WARM, of_steps
from patterns import Pattern
from rules import RULES, Rule
from runs import Record, RunFailed, run
from steps import pattern_of

CONSTANT = ("none", "permanent", "speeds")
STEPS, MICROBATCHES, SAMPLES, WIDTH = 14, 16, 16, 256
USED = 0.75
"""Of the machine's cores, so that it is the quotas that hold the workers up."""
_PERIOD_MICROSECONDS = 20_000
_LEAST_QUOTA = 1_000
_ROOT = Path("/sys/fs/cgroup")


def measure(folder: Path, rules: Sequence[Rule], options: argparse.Namespace) -> dict[str, Any]:
    """Run the rules with common steps under quotas, or say why that cannot be."""
    try:
        with groups("probe", [0.5]):
            pass
    except OSError as error:
        print(f"\nquotas: left out, no control group can be made: {error}")
        return {"left_out": str(error)}
    cores = len(os.sched_getaffinity(0)) * USED
    (alone,) = run(folder, "quotas-alone", [plan(RULES["allreduce"], 1, None, 4)], 1, script="quotas.py")
    ends = alone.workers[0]["ends"]
    microbatch = (ends[-1] - ends[0]) / (len(ends) - 1) / MICROBATCHES
    print(f"\nreal computing under CPU quotas: {1e3 * microbatch:.2f} ms a microbatch alone, {cores:.1f} cores")
    results: dict[str, Any] = {"microbatch_seconds": microbatch, "cores": cores}
    for rule in [one for one in rules if one.steps]:
        results[rule.name] = {}
        for name in [one for one in CONSTANT if one == "none" or one in options.patterns]:
            try:
                one = ratio(folder, rule, pattern_of(name, options), microbatch, cores)
            except RunFailed as failed:
                print(f"{rule.name:14} {name:10} {failed}")
                continue
            results[rule.name][name] = one
            told = f"whole {one['whole']:.3f}  median {one['median']:.3f}  p99 {one['tail']:.3f}"
            print(f"{rule.name:14} {name:10} {told}  machine {one['machine_cores']:.2f}", flush=True)
    return results


def ratio(folder: Path, rule: Rule, pattern: Pattern, microbatch: float, cores: float) -> dict[str, Any]:
    """One rule under one pattern."""
    unit = cores / pattern.speed(0)
    quotas = [unit / pattern.slowdown(worker, 0) for worker in range(pattern.workers)]
    with groups(f"{os.getpid()}", quotas) as paths:
        session = plan(rule, pattern.workers, paths, STEPS)
        name = f"quotas-{rule.name}-{pattern.name}"
        record: Record = run(folder, name, [session], pattern.workers, script="quotas.py")[0]
    ends = [worker["ends"] for worker in record.workers]
    found = of_steps(ends, pattern, MICROBATCHES * pattern.workers, microbatch / unit)
    return {**asdict(found), "machine_cores": record.machine_cores, "warm": WARM}


def plan(rule: Rule, workers: int, groups: list[str] | None, steps: int) -> dict[str, Any]:
    microbatches = MICROBATCHES * workers
    settings = {**rule.settings, "microbatches": microbatches}
    return {"groups": groups, "steps": steps, "batch": microbatches * SAMPLES, "settings": settings}


@contextlib.contextmanager
def groups(name: str, quotas: Sequence[float]) -> Iterator[list[str]]:
    """Control groups with these quotas, in cores; each is the file to which a process writes its id to come in."""
    version2 = (_ROOT / "cgroup.controllers").exists()
    root = _ROOT if version2 else _ROOT / "cpu"
    made: list[Path] = []
    try:
        for place, quota in enumerate(quotas):
            path = root / f"paceline-stragglers-{name}-{place}"
            path.mkdir()
            made.append(path)
            microseconds = max(_LEAST_QUOTA, round(quota * _PERIOD_MICROSECONDS))
            if version2:
                (path / "cpu.max").write_text(f"{microseconds} {_PERIOD_MICROSECONDS}")
            else:
                (path / "cpu.cfs_period_us").write_text(str(_PERIOD_MICROSECONDS))
                (path / "cpu.cfs_quota_us").write_text(str(microseconds))
        yield [str(path / "cgroup.procs") for path in made]
    finally:
        for path in made:
            _remove(path)


def _remove(path: Path) -> None:
    """A group can be removed when its last process is gone, a moment after it has ended."""
    for _ in range(200):
        try:
            path.rmdir()
            return
        except OSError:
            time.sleep(0.02)
    print(f"the control group {path} could not be removed")


def work(one: dict[str, Any], folder: Path) -> None:
    """What each worker does."""
    import torch
    from worker import machine_busy

    import paceline

    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = torch.randn(one["batch"] * 4, WIDTH)
    session = paceline.start(
        model=torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 4)),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        forward=heavy,
        data=torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1)),
        batch=one["batch"],
        threads=1,
        **one["settings"],
    )
    if one["groups"]:
        Path(one["groups"][session.rank]).write_text(str(os.getpid()))
    begin, busy, ends = time.monotonic(), machine_busy(), []
    for batch in session.batches(steps=one["steps"]):
        session.step(batch)
        ends.append(time.monotonic())
    record = {"rank": session.rank, "begin": begin, "end": ends[-1], "ends": ends, "machine": machine_busy() - busy}
    (folder / f"0-{session.rank}.json").write_text(json.dumps(record))


def heavy(model: Any, microbatch: Any) -> Any:
    """A forward pass with as much to compute as if the model were ten times deeper."""
    import torch

    inputs, target = microbatch
    hidden = inputs
    for _ in range(10):
        hidden = torch.tanh(model[0](hidden))
    return torch.nn.functional.cross_entropy(model[2](hidden), target)


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    work(given["sessions"][0], Path(given["folder"]))
