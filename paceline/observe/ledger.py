"""Ledger of applied steps: a check that every step was applied exactly once, through all failures. It needs no torch.

The samples of a step are a pure function of its number, so every sample of every epoch was used exactly once if each
of the steps 0, 1, 2, ... was applied exactly once. Every worker records the steps that it applied, so a step is in
several files. The rules:

* Each step is recorded, and none beyond the last.
* A process records its steps in order and none of them twice. All workers of a generation apply a step together. If a
  step is repeated although a worker that applied it survived, this worker has recorded it twice. Steps that only lost
  workers had applied are lost with them, so repeating them is correct.
* Resuming from a checkpoint undoes the later steps recorded before. So does a generation that begins at an earlier
  step: all workers that had applied the later steps are lost.
* All records of a step have the same samples and, within a generation, the same loss, if workers report a common loss.

With an asynchronous strategy, a single worker computes a step and records the update. So updates are counted:

* Each step has one update, or was skipped. An update survives the loss of its worker. Resuming from an earlier step
  undoes it, as does a generation of new workers only. An update by a worker that the others have dropped is void.
* The last records of a killed worker are lost. Updates are numbered, so at most as many steps may lack a record as
  numbers are missing. A worker that is left alone does not number its updates, which makes this check impossible.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.observe.tracing.clocks import on_one_clock
from paceline.schedule.pipeline.choice import ASYNC_SCHEDULES
from paceline.system.regular_files import read_text

_GATHERED = ("membership", "gathered", "recovered")


@dataclass(frozen=True)
class AppliedStep:
    """A step that a worker applied."""

    step: int  # step number, from 0
    generation: int  # membership generation of the workers
    rank: int  # rank of the worker at that time
    process: str  # the process, which stays the same when its rank changes
    time: float  # completion time, in seconds since 1970
    samples: int  # number of samples in the whole batch
    loss: float | None  # loss of the whole batch


@dataclass(frozen=True)
class Update:
    """A step that one worker applied for all workers."""

    step: int  # step number, from 0
    generation: int  # membership generation of the workers
    time: float  # completion time, in seconds since 1970
    skipped: bool = False  # whether the step was skipped because its loss was not finite
    version: int = 0  # number of the update, from 1. 0 without an update, or if the worker was alone.


@dataclass(frozen=True)
class Recovery:
    """A process that continued in a new generation."""

    time: float  # time when it continued, in seconds since 1970
    generation: int  # the new generation
    process: str  # the process
    step: int  # step at which the generation began
    seconds: float  # duration of the recovery
    lost: tuple[int, ...]  # numbers of the lost workers
    joined: tuple[int, ...]  # numbers of the new workers, which may include this process
    all_new: bool = False  # whether all workers are new

    @property
    def survived(self) -> bool:
        """Whether this process survived the loss of another process."""
        return bool(self.lost) and self.process not in {_worker(number) for number in self.joined}


@dataclass(frozen=True)
class Records:
    """Step records of a run, in order of time."""

    applied: tuple[AppliedStep, ...] = ()  # steps applied by each worker
    recovered: tuple[Recovery, ...] = ()  # recoveries after each membership change
    # time and step of each resume, and of each return to a state in memory after a loss
    resumed: tuple[tuple[float, int], ...] = ()
    updates: tuple[Update, ...] = ()  # updates by the single worker that computed a step, with asynchronous strategies
    asynchronous: bool = False  # whether each step is computed by one worker
    own_losses: bool = False  # whether each worker reports its own loss


def read(events: Path) -> Records:
    """Read the ``*.jsonl`` files in the ``events`` folder of a run. Incomplete lines of killed workers are skipped."""
    files: list[list[Mapping[str, Any]]] = []
    for path in sorted(events.glob("*.jsonl")):
        files.append([])
        for text in read_text(path, errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                files[-1].append(json.loads(text))
    return records_of(on_one_clock(files))


def records_of(lines: Iterable[Mapping[str, Any]]) -> Records:
    """Return the step records among parsed event lines."""
    applied, recovered, resumed, updates = [], [], [], []
    lines = sorted(lines, key=lambda line: float(line["time"]))
    processes = _processes(lines)
    starts = [line for line in lines if line["event"] == "start"]
    asynchronous, own_losses = any(map(is_asynchronous, starts)), any(map(_has_own_losses, starts))
    for line in lines:
        when, event = float(line["time"]), line["event"]
        generation = int(line.get("generation", 0))
        if event == "step":
            rank, step, samples = int(line["rank"]), int(line["step"]), int(line["samples"])
            process = processes.get((generation, rank), f"rank {rank}")
            applied.append(AppliedStep(step, generation, rank, process, when, samples, line.get("loss")))
        elif event == "recovered":
            lost, joined = (tuple(line.get(key) or ()) for key in ("lost", "joined"))
            seconds = float(line.get("seconds", 0.0))
            process = processes.get((generation, int(line["rank"])), f"rank {line['rank']}")
            all_new = "workers" in line and set(line["workers"]) <= set(joined)
            recovered.append(Recovery(when, generation, process, int(line["step"]), seconds, lost, joined, all_new))
        elif event in ("resume", "went back"):
            resumed.append((when, int(line["step"])))
        elif event in ("update", "skipped") and asynchronous:
            skipped, version = event == "skipped", int(line.get("version", 0))
            updates.append(Update(int(line["step"]), generation, when, skipped, version))
    return Records(tuple(applied), tuple(recovered), tuple(resumed), tuple(updates), asynchronous, own_losses)


def is_asynchronous(start: Mapping[str, Any]) -> bool:
    """Return whether each step is computed by one worker, according to a session's start event."""
    strategy = start.get("strategy")
    return strategy == "hogwild" or (strategy == "parameter-server" and start.get("server.mode", "sync") != "sync")


def _has_own_losses(start: Mapping[str, Any]) -> bool:
    """Return whether a worker reports the loss of its own share, or of the newest step that it knows."""
    strategy = start.get("strategy")
    unflushed = strategy == "pipeline" and start.get("pipeline.schedule") in ASYNC_SCHEDULES
    return strategy in ("diloco", "local-sgd") or unflushed or is_asynchronous(start)


def _processes(lines: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int], str]:
    """Return the process of each generation and rank, from the rendezvous events."""
    found = {}
    for line in lines:
        for rank, worker in enumerate(line.get("workers") or () if line["event"] in _GATHERED else ()):
            found[int(line.get("generation", 0)), rank] = _worker(worker)
    return found


def _worker(number: object) -> str:
    return f"worker {number}"


def check(records: Records, steps: int, samples_of: Callable[[int], int] | None = None) -> list[str]:
    """Describe the problems in the records, one sentence each. Empty if each step was applied exactly once.

    Args:
        records: records of the run.
        steps: expected number of steps.
        samples_of: returns the expected number of samples in a step. If None, samples are not checked.
    """
    applied, updates = _applied(records), _updates(records)
    numbers = {one.step for one in (updates if records.asynchronous else applied)}
    missing = [f"step {step} was never applied" for step in range(steps) if step not in numbers]
    problems = missing if len(missing) > _unrecorded(updates) else []
    problems += [f"step {step} is beyond the last one, {steps - 1}" for step in sorted(numbers) if step >= steps]
    counts = Counter(one.step for one in updates if not one.skipped)
    problems += [f"step {step} was applied {counts[step]} times" for step in sorted(counts) if counts[step] > 1]
    problems += _out_of_order([one for one in records.applied if not _resumed_before(one, records.resumed)])
    by_step: dict[int, list[AppliedStep]] = defaultdict(list)
    for one in applied:
        by_step[one.step].append(one)
    for step in sorted(by_step):
        problems += _of_step(step, by_step[step], samples_of, records.own_losses)
    return problems


def _applied(records: Records) -> list[AppliedStep]:
    begins = {one.generation: one.step for one in records.recovered}
    return [one for one in records.applied if not _is_undone(one, records.resumed, begins)]


def _updates(records: Records) -> list[Update]:
    begins = {one.generation: one.step for one in records.recovered if one.all_new}
    kept = [one for one in records.updates if not _is_undone(one, records.resumed, begins)]
    return [one for one in kept if not _is_late(one, records)]


def _is_late(one: Update, records: Records) -> bool:
    """Return whether the update's worker had already been dropped."""
    resumed = max((when for when, _ in records.resumed if when <= one.time), default=0.0)  # generations restart
    return any(one.generation < other.generation and resumed < other.time < one.time for other in records.recovered)


def _is_undone(one: AppliedStep | Update, resumed: Sequence[tuple[float, int]], begins: Mapping[int, int]) -> bool:
    """Return whether a resume or a later generation undid a step. ``begins`` maps generations to their first steps."""
    return _resumed_before(one, resumed) or any(
        one.generation < generation and begin <= one.step for generation, begin in begins.items()
    )


def _unrecorded(updates: Sequence[Update]) -> float:
    """Return the number of updates that may lack a record."""
    versions = {one.version for one in updates if not one.skipped}
    if len(versions) > 1 and 0 in versions:  # a worker was left alone
        return math.inf
    return max(versions, default=0) - len(versions - {0})


def _resumed_before(one: AppliedStep | Update, resumed: Sequence[tuple[float, int]]) -> bool:
    return any(one.time < when and step <= one.step for when, step in resumed)


def _out_of_order(applied: Sequence[AppliedStep]) -> list[str]:
    problems = []
    before: dict[str, int] = {}
    for one in applied:
        if one.step <= before.get(one.process, -1):
            problems.append(f"{one.process} applied step {one.step} after step {before[one.process]}")
        before[one.process] = one.step
    return problems


def _of_step(
    step: int, applied: list[AppliedStep], samples_of: Callable[[int], int] | None, own_losses: bool
) -> list[str]:
    problems = []
    samples = {one.samples for one in applied}
    if len(samples) > 1:
        problems.append(f"step {step} has different samples: {', '.join(map(str, sorted(samples)))}")
    if samples_of is not None and samples != {samples_of(step)}:
        problems.append(f"step {step} has {min(samples)} samples instead of {samples_of(step)}")
    for generation in sorted({one.generation for one in applied} if not own_losses else ()):
        losses = {one.loss for one in applied if one.generation == generation}
        if len(losses) > 1 and not all(loss is None or math.isnan(loss) for loss in losses):
            problems.append(f"step {step} has different losses: {', '.join(map(str, losses))}")
    return problems


def completions(records: Records) -> list[float]:
    """Return the times at which the steps were first completed by any worker, in order, in seconds since 1970."""
    done: dict[int, float] = {}
    for one in _updates(records) if records.asynchronous else _applied(records):  # in order of time
        done.setdefault(one.step, one.time)
    return sorted(done.values())
