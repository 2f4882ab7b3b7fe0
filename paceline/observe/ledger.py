"""Was every step done exactly once, whatever went wrong? Read from the records of a run. No torch here.

The samples of a step are a pure function of its number, so every sample of every epoch was used exactly once if the
steps 0, 1, 2, ... were each applied exactly once. Every worker records the steps that it applied, so the same step
stands in several files. The rules:

* Each step is recorded, and none beyond the last.
* A process records its steps in order and none of them twice. A step is done by all workers of a generation together,
  so a step that is repeated although a worker with it lived on stands twice in the records of that worker. What only
  lost workers had applied is lost with them, and repeating it is right.
* A step that was recorded before a checkpoint of an earlier step was resumed from is undone by that. So is one that was
  recorded in an earlier generation than one that began at an earlier step: all who had applied it are lost.
* All records of one step tell the same samples, and within a generation the same loss, if workers report one.

With an asynchronous strategy all workers' loops come to a step, and one of them computes it. Only that one records the
update, so the updates are counted:

* Each step has one update, or was skipped. An update stays when its worker is lost; it is undone by resuming from an
  earlier step, or when all workers are new. One that a worker makes after the others went on without it is in vain.
* A killed worker's last records are lost with it. Updates are numbered, so steps may lack a record if as many numbers
  do; one that is left alone gives no numbers, and then it cannot be known.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.schedule.choice import ASYNC_SCHEDULES

_NEXT_GAPS = 2
_GATHERED = ("membership", "gathered", "recovered")


@dataclass(frozen=True)
class AppliedStep:
    """A step that a process recorded as applied.

    Attributes:
        step: its number, from 0.
        generation: of the workers.
        rank: of the process then.
        process: the process, which stays while its rank changes.
        time: seconds since 1970 when the step was done.
        samples: in the whole batch.
        loss: of the whole batch.
    """

    step: int
    generation: int
    rank: int
    process: str
    time: float
    samples: int
    loss: float | None


@dataclass(frozen=True)
class Update:
    """A step that one worker did for all.

    Attributes:
        step: its number, from 0.
        generation: of the workers.
        time: seconds since 1970 when it was done.
        skipped: whether it was left out because its loss was not finite.
        version: the number of its update, from 1; 0 if it made none, or the worker was alone.
    """

    step: int
    generation: int
    time: float
    skipped: bool = False
    version: int = 0


@dataclass(frozen=True)
class Recovery:
    """A process went on in a new generation.

    Attributes:
        time: seconds since 1970 when it did.
        generation: the new one.
        process: the process.
        step: at which the generation began.
        seconds: how long the process had done nothing else.
        lost: the numbers of the workers that are gone.
        joined: those of the workers that are new, this one perhaps among them.
        anew: whether all of them are.
    """

    time: float
    generation: int
    process: str
    step: int
    seconds: float
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    anew: bool = False

    @property
    def survived(self) -> bool:
        """Whether this process was there before and another one was lost."""
        return bool(self.lost) and self.process not in {_worker(number) for number in self.joined}


@dataclass(frozen=True)
class Records:
    """What the workers of a run recorded, as far as it concerns the steps, in the order of time.

    Attributes:
        applied: by each worker whose loop came to a step.
        recovered: after each change of the workers.
        resumed: when, and from which step on.
        done: by the one worker that computed a step, where each step has one.
        one_each: whether each step has one.
        own_losses: whether workers report losses of their own.
    """

    applied: tuple[AppliedStep, ...] = ()
    recovered: tuple[Recovery, ...] = ()
    resumed: tuple[tuple[float, int], ...] = ()
    done: tuple[Update, ...] = ()
    one_each: bool = False
    own_losses: bool = False


def read(events: Path) -> Records:
    """Read the files ``*.jsonl`` of a run's folder ``events``; the half line of a killed process is left out."""
    lines: list[Mapping[str, Any]] = []
    for path in sorted(events.glob("*.jsonl")):
        for text in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(text))
    return records_of(lines)


def records_of(lines: Iterable[Mapping[str, Any]]) -> Records:
    """The same from the records themselves."""
    applied, recovered, resumed, done = [], [], [], []
    lines = sorted(lines, key=lambda line: float(line["time"]))
    processes = _processes(lines)
    starts = [line for line in lines if line["event"] == "start"]
    one_each, own_losses = any(map(_is_asynchronous, starts)), any(map(_has_own_losses, starts))
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
            anew = "workers" in line and set(line["workers"]) <= set(joined)
            recovered.append(Recovery(when, generation, process, int(line["step"]), seconds, lost, joined, anew))
        elif event == "resume":
            resumed.append((when, int(line["step"])))
        elif event in ("update", "skipped") and one_each:
            skipped, version = event == "skipped", int(line.get("version", 0))
            done.append(Update(int(line["step"]), generation, when, skipped, version))
    return Records(tuple(applied), tuple(recovered), tuple(resumed), tuple(done), one_each, own_losses)


def _is_asynchronous(start: Mapping[str, Any]) -> bool:
    """Whether each step is computed by one worker, as a session told when it began."""
    strategy = start.get("strategy")
    return strategy == "hogwild" or (strategy == "parameter-server" and start.get("server.mode", "sync") != "sync")


def _has_own_losses(start: Mapping[str, Any]) -> bool:
    """Whether a worker reports the loss of what it computed, or of the newest step that it knows of."""
    strategy = start.get("strategy")
    streamed = strategy == "pipeline" and start.get("pipeline.schedule") in ASYNC_SCHEDULES
    return strategy == "local-sgd" or streamed or _is_asynchronous(start)


def _processes(lines: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int], str]:
    """Which process held a rank in a generation: the workers say so when they gather."""
    found = {}
    for line in lines:
        for rank, worker in enumerate(line.get("workers") or () if line["event"] in _GATHERED else ()):
            found[int(line.get("generation", 0)), rank] = _worker(worker)
    return found


def _worker(number: object) -> str:
    return f"worker {number}"


def check(records: Records, steps: int, samples_of: Callable[[int], int] | None = None) -> list[str]:
    """What is wrong with the ledger, in sentences; empty if each step was applied exactly once.

    Args:
        records: of the run.
        steps: how many steps there must be.
        samples_of: the samples that the batch of a step must have, if that is to be checked too.
    """
    counted, done = _counted(records), _done(records)
    numbers = {one.step for one in (done if records.one_each else counted)}
    missing = [f"step {step} was never applied" for step in range(steps) if step not in numbers]
    problems = missing if len(missing) > _unrecorded(done) else []
    problems += [f"step {step} is beyond the last one, {steps - 1}" for step in sorted(numbers) if step >= steps]
    updates = Counter(one.step for one in done if not one.skipped)
    problems += [f"step {step} was applied {updates[step]} times" for step in sorted(updates) if updates[step] > 1]
    problems += _out_of_order([one for one in records.applied if not _resumed_before(one, records.resumed)])
    by_step: dict[int, list[AppliedStep]] = defaultdict(list)
    for one in counted:
        by_step[one.step].append(one)
    for step in sorted(by_step):
        problems += _of_step(step, by_step[step], samples_of, records.own_losses)
    return problems


def _counted(records: Records) -> list[AppliedStep]:
    """The steps that were not undone."""
    begins = {one.generation: one.step for one in records.recovered}
    return [one for one in records.applied if not _is_undone(one, records.resumed, begins)]


def _done(records: Records) -> list[Update]:
    """The same of those that one worker did."""
    begins = {one.generation: one.step for one in records.recovered if one.anew}
    kept = [one for one in records.done if not _is_undone(one, records.resumed, begins)]
    return [one for one in kept if not _is_late(one, records)]


def _is_late(one: Update, records: Records) -> bool:
    """Whether the others had gone on without its worker by then, with weights of their own."""
    resumed = max((when for when, _ in records.resumed if when <= one.time), default=0.0)  # generations begin anew
    return any(one.generation < other.generation and resumed < other.time < one.time for other in records.recovered)


def _is_undone(one: AppliedStep | Update, resumed: Sequence[tuple[float, int]], begins: Mapping[int, int]) -> bool:
    """Whether it was, by a resume or by a later generation; these began at steps."""
    return _resumed_before(one, resumed) or any(
        one.generation < generation and begin <= one.step for generation, begin in begins.items()
    )


def _unrecorded(done: Sequence[Update]) -> float:
    """How many updates may have left no record."""
    versions = {one.version for one in done if not one.skipped}
    if len(versions) > 1 and 0 in versions:  # one was left alone
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


# How long it took.


def completions(records: Records) -> list[float]:
    """When each step was first done by anyone, the earliest first: seconds since 1970."""
    done: dict[int, float] = {}
    for one in _done(records) if records.one_each else _counted(records):  # in the order of time
        done.setdefault(one.step, one.time)
    return sorted(done.values())


def step_seconds(times: Sequence[float]) -> float:
    """The median time from the end of one step to that of the next; 0 for less than two steps."""
    return statistics.median(_gaps(times)) if len(times) > 1 else 0.0


def stall(times: Sequence[float], fault: float, usual: float) -> float:
    """The seconds that training lost by a fault.

    That is the longest time between two steps among the one in which the fault falls and the two after it (a worker
    that is killed after it gave its part is missed in the next step only), less the usual time.

    Args:
        times: when each step was done, in order.
        fault: when the fault happened.
        usual: seconds between two steps.
    """
    first = max(0, sum(time <= fault for time in times) - 1)
    near = _gaps(times)[first : first + 1 + _NEXT_GAPS]
    return max(0.0, max(near) - usual) if near else 0.0


def replaced_after(records: Records, fault: float) -> float | None:
    """Seconds from a fault until a new worker had joined; none if none did."""
    return next((one.time - fault for one in records.recovered if one.time > fault and one.joined), None)


def goodput(times: Sequence[float], began: float, usual: float) -> float:
    """The part of the wall time from the beginning to the last step that useful steps would have taken alone."""
    wall = times[-1] - began if times else 0.0
    return min(1.0, len(times) * usual / wall) if wall > 0 else 0.0


def percentile(values: Sequence[float], part: float) -> float:
    """The nearest-rank percentile: the smallest value that at least this part of all does not exceed; NaN of none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


def _gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]
