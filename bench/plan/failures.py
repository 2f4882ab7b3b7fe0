"""Predicted and measured goodput of runs whose workers are killed as in a trace, at accelerated time.

Each worker stands for a spot machine. Its layers sleep, so two cores are enough for four workers. The kills of a run
are one history of a trace, or of a constant rate. The same history is replayed by ``paceline plan``'s model of
failures. What a recovery costs is measured before, in a run with other kills.

    python bench/plan/failures.py
    python bench/plan/failures.py --trace interruptions.csv --speed 720 --runs 10
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path
from random import Random
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import chaos
import durations

from paceline.observe import ledger
from paceline.planning.renting.failures import Job, replay
from paceline.planning.renting.interruptions import Exponential, Interruption, read_trace

WORKERS, MICROBATCHES, ASLEEP = 4, 24, 0.03
CALIBRATION_STEPS, WARM = 40, 10
CALIBRATION_KILLS = 5
SCRIPT = f"""
import os, sys, time
from functools import partial
import torch
import paceline

open(os.path.join(os.path.dirname(__file__), f"process-{{os.getpid()}}"), "w").write(os.environ["PACELINE_WORKER"])
torch.set_num_threads(1)
torch.manual_seed(0)
inputs = torch.randn(960, 32)

def forward(model, batch):
    time.sleep({ASLEEP})
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

session = paceline.start(
    model=torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Tanh(), torch.nn.Linear(256, 4)),
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    forward=forward,
    data=torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1)),
    batch={MICROBATCHES},
    microbatches={MICROBATCHES},
    exact=True,
    threads=1,
)
for batch in session.batches(steps=int(sys.argv[1])):
    session.step(batch)
"""


@dataclass(frozen=True)
class Recorded:
    """Interruptions at known times."""

    losses: Sequence[Interruption]

    def history(self, random: Random, slots: int) -> Iterator[Interruption]:
        """Yield the interruptions."""
        yield from self.losses
        yield Interruption(float("inf"), (), 0.0)


class Kills:
    """Kills the workers of a run at the times of a history.

    A replacement has the slot of the worker that it replaces, as in the model.
    """

    def __init__(self, history: Recorded, events: Path, script: Path) -> None:
        self._left = list(history.losses)
        self._events, self._script = events, script
        self.began = 0.0
        self.faults: list[chaos.Fault] = []

    def begin(self) -> None:
        """Training has begun."""
        self.began = time.time()

    def act(self, look: object) -> None:
        """Kill the workers that are due."""
        while self._left and time.time() >= self.began + self._left[0].time:
            slots = _slots(self._events)
            files = sorted(self._script.parent.glob("process-*"), key=lambda path: path.stat().st_mtime)
            pids = {int(path.read_text() or -1): int(path.name.partition("-")[2]) for path in files}
            for slot in self._left.pop(0).slots:
                if slots[slot] in pids:
                    self.faults.append(chaos.Fault(time.time(), "kill", True))
                    chaos.send(pids[slots[slot]], signal.SIGKILL)

    def end(self) -> None:
        """Stop killing workers."""
        self._left = []


def _slots(events: Path) -> list[int | None]:
    """Return the number of the worker in each slot, or None while it is replaced."""
    records = [json.loads(line) for line in (events / "launcher.jsonl").read_text().splitlines()]
    views = [record["workers"] for record in records if record["event"] == "membership"]
    slots: list[int | None] = sorted(views[0])
    for view in views[1:]:
        slots = [number if number in view else None for number in slots]
        for number in (one for one in view if one not in slots):
            slots[slots.index(None)] = number
    return slots


def run(folder: Path, name: str, steps: int, history: Recorded) -> tuple[ledger.Records, Kills]:
    """Train with these kills."""
    words = [sys.executable, "-m", "paceline.cli.main", "run", "-n", str(WORKERS), "--quiet", "--standby", "0"]
    words += ["--elastic", f"1:{WORKERS}", "--runs-dir", str(folder), "--name", name]
    words += [str(folder / "script.py"), str(steps)]
    for path in folder.glob("process-*"):
        path.unlink()
    kills: Any = Kills(history, folder / name / "events", folder / "script.py")
    code, output = chaos.attempt(words, folder / name, folder / "script.py", kills, chaos.PATIENCE_SECONDS)
    if code:
        raise SystemExit(output)
    return ledger.read(folder / name / "events"), kills


def pace(events: Path, times: Sequence[float]) -> float:
    """Return the median seconds of a step with all workers in this run, because other programs share the machine."""
    records = [json.loads(line) for line in (events / "launcher.jsonl").read_text().splitlines()]
    views = [(record["time"], len(record["workers"])) for record in records if record["event"] == "membership"]
    gaps = []
    for before, after in pairwise(times):
        during = [count for time, count in views if before < time < after]
        known = [count for time, count in views if time <= before]
        if not during and known[-1:] == [WORKERS]:
            gaps.append(after - before)
    return statistics.median(gaps)


def calibrated(folder: Path) -> Job:
    """Return the costs of a run: seconds of a step, of a stall, and until a replacement joins."""
    times = ledger.completions(run(folder, "undisturbed", CALIBRATION_STEPS, Recorded(()))[0])
    usual = durations.step_seconds(times[WARM:])
    every = 8.0
    history = [Interruption(every * (1 + one), ((1 + one) % WORKERS,), 0.0) for one in range(CALIBRATION_KILLS)]
    records, kills = run(folder, "calibration", round(every * (CALIBRATION_KILLS + 1) / usual), Recorded(history))
    times = ledger.completions(records)
    stalls, starts = [], []
    for fault in kills.faults:
        after = next(one for one in times if one > fault.time)
        stalls.append(after - fault.time - usual * WORKERS / (WORKERS - 1))
        joined = next(one.time for one in records.recovered if one.time > fault.time and one.joined)
        before, after = next((one, other) for one, other in pairwise(times) if other > joined)
        stalls.append(after - before - usual)
        starts.append(before - fault.time)
    print(
        f"calibrated   step {usual:.3f} s, stalls {_listed(stalls)} s, replaced after {_listed(starts)} s", flush=True
    )
    return Job(
        CALIBRATION_STEPS, usual, WORKERS, WORKERS, max(statistics.fmean(stalls), 0.0),
        start_up_seconds=statistics.fmean(starts),
    )  # fmt: skip


def _listed(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def main() -> None:
    """Print a line for each run, then the mean of the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="number of the first history")
    parser.add_argument("--seconds", type=float, default=40, help="of a run without kills")
    parser.add_argument("--trace", type=Path, help="CSV, as for paceline plan --trace")
    parser.add_argument("--per-hour", type=float, default=0.25, help="interruptions of a machine, without a trace")
    parser.add_argument("--speed", type=float, default=360, help="seconds of the trace in a second")
    options = parser.parse_args()
    interruptions = read_trace(options.trace) if options.trace else Exponential(options.per_hour)
    differences = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "script.py").write_text(SCRIPT)
        job = calibrated(folder)
        job = replace(job, steps=round(options.seconds / job.step_seconds))
        for number in range(options.first, options.first + options.runs):
            accelerated = (
                Interruption(one.time / options.speed, one.slots, 0.0)
                for one in interruptions.history(Random(number), WORKERS)
            )
            history = Recorded([*takewhile(lambda one: one.time < 20 * options.seconds, accelerated)])
            before = replay(job, history, histories=1).goodput.mean
            records, kills = run(folder, str(number), job.steps, history)
            times = ledger.completions(records)
            usual = pace(folder / str(number) / "events", times)
            measured = durations.goodput(times, times[0] - usual, usual)
            after = replay(replace(job, step_seconds=usual), history, histories=1).goodput.mean
            differences.append((before - measured, after - measured))
            print(
                f"run {number}        {len(kills.faults)} kills   goodput measured {measured:.1%}   predicted "
                f"{before:.1%}, with this run's step of {usual:.3f} s {after:.1%}   load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    means = [100 * statistics.fmean(map(abs, those)) for those in zip(*differences, strict=True)]
    print(f"{options.runs} runs       mean difference {means[0]:.1f} points, with the step of each run {means[1]:.1f}")


if __name__ == "__main__":
    main()
