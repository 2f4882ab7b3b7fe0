"""A step of a pipeline, predicted and measured, and who waited for whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from paceline.errors import ConfigError, InputError
from paceline.observe.completeness import complete_steps
from paceline.observe.pipelines import KINDS, Pipeline, RecordedOperation, operations_of, pipelines_of
from paceline.observe.records import read
from paceline.observe.timelines import layout_of, measured, predicted, schedule_of
from paceline.observe.times import median_times, profiled_times
from paceline.schedule.clock import TRANSFERS, Timeline, Times
from paceline.schedule.operations import Kind, Schedule
from paceline.schedule.proof import prove

_WARM = 3
"""Steps at the beginning that are not chosen unless asked for."""
_NEAR = 20
"""So many steps before and after are looked at for the median times."""
_ON_MICROBATCHES = KINDS.keys() - {"reduce", "update"}


@dataclass(frozen=True)
class Comparison:
    """A step, predicted and measured.

    Attributes:
        run: the folder of the run.
        pipeline: how the model was cut then.
        step: its number.
        schedule: what the workers do.
        times: by which it is predicted.
        usual: the medians of what operations took around this step.
        predicted: by the clock.
        measured: from the records.
    """

    run: Path
    pipeline: Pipeline
    step: int
    schedule: Schedule
    times: Times
    median_times: Times
    predicted: Timeline
    measured: Timeline

    @property
    def from_profile(self) -> bool:
        """Whether the times of the prediction are from before training; else they are the usual ones."""
        return self.pipeline.times is not None

    @property
    def kept(self) -> tuple[int, ...]:
        """Of how many microbatches and stages each worker keeps activations at a time."""
        return prove(self.schedule).activations

    @property
    def source(self) -> str:
        """Where the times of the prediction are from, in sentences."""
        if not self.from_profile:
            return (
                "Predicted from the medians of what each operation of a stage took in the steps around this one, as "
                "the layers were not measured before training: the cut was given."
            )
        halves = Kind.WEIGHT in {one.kind for operations in self.schedule.workers for one in operations}
        half = " Each half of a backward pass counts as half of it." if halves else ""
        return (
            "Predicted from what the layers took when they were measured before training; transfers and updates count "
            f"as free.{half}"
        )

    @property
    def waits(self) -> tuple[dict[int, float], ...]:
        """For each worker the seconds that it waited to receive from each other one, or to send to it."""
        found: list[dict[int, float]] = [defaultdict(float) for _ in self.measured.workers]
        for worker, spans in enumerate(self.measured.workers):
            for (kind, _, microbatch, _, peer), begin, end in spans:
                if kind in TRANSFERS:
                    found[worker][self.schedule.worker_of(peer, microbatch)] += end - begin
        return tuple(found)

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds that each worker neither computed nor waited for another one."""
        spent = zip(self.measured.busy, self.waits, strict=True)
        return tuple(max(0.0, self.measured.seconds - busy - sum(waits.values())) for busy, waits in spent)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a worker holds, also if there is no microbatch for it in this step."""
        return layout_of(self.pipeline).stages_of(rank)

    @property
    def launches(self) -> bool:
        """Whether the times of operations are those of launches: a GPU computes beside its worker."""
        return self.pipeline.device == "cuda"


def compare(run: Path, step: int | None = None) -> Comparison:
    """A step of the newest pipeline of a run that has it.

    Args:
        run: the folder of the run.
        step: its number; none: one that took about as long as most, of those at the end of the run with one cut.

    Raises:
        ConfigError: there is no such step, or records of it are missing.
        InputError: the run has no events, was no pipeline, or records of each step are missing.
    """
    pipelines = [one for one in pipelines_of(read(run, ("cut", "step"))) if one.ended]
    if not pipelines:
        raise InputError(_no_pipeline(run))
    pipeline, step = _chosen(run, pipelines, step)
    done = _near(run, pipeline, step)
    as_it_was = measured(pipeline, done, step)
    medians = median_times(done, len(pipeline.stages))
    times = profiled_times(pipeline) or medians
    schedule = schedule_of(pipeline, done, step)
    by_the_clock = predicted(pipeline, done, step, schedule, times)
    return Comparison(run, pipeline, step, schedule, times, medians, by_the_clock, as_it_was)


def _near(run: Path, pipeline: Pipeline, step: int) -> list[RecordedOperation]:
    """The operations of the steps around one, in the order in which they began."""
    records = read(run, KINDS, range(step - _NEAR, step + _NEAR + 1))
    return sorted(operations_of(records, pipeline), key=lambda done: done.span.begin)


def _chosen(run: Path, pipelines: Sequence[Pipeline], step: int | None) -> tuple[Pipeline, int]:
    """Of the newest pipeline that has it; all records are read only if those of that step are not all there."""
    newest = next((one for one in reversed(pipelines) if step is None or step in one.ended), None)
    if newest is not None:
        wanted = _usual(newest, newest.ended) if step is None else step
        if wanted in complete_steps(_near(run, newest, wanted), newest):
            return newest, wanted
    complete = [(one, complete_steps(operations_of(read(run, _ON_MICROBATCHES), one), one)) for one in pipelines]
    last = {number: place for place, one in enumerate(pipelines) for number in one.ended}
    there = sorted(number for place, (_, steps) in enumerate(complete) for number in steps if last[number] == place)
    if not there:
        raise InputError(
            f"No step of {run} can be drawn: of each one records of operations are missing. A full disk loses records; "
            f"train some more steps with room in {run / 'events'}."
        )
    if step is None:
        return next((pipeline, _usual(pipeline, steps)) for pipeline, steps in reversed(complete) if steps)
    why = "records of its operations are missing" if newest is not None else "this step cannot be drawn"
    raise ConfigError(f"--step {step}: {why}. Those that can{' be drawn' if newest else ''}: {ranges(there)}.")


def _usual(pipeline: Pipeline, steps: Sequence[int]) -> int:
    """The one of median length, without the first ones."""
    usable = steps[_WARM:] or steps[-1:]
    return sorted(usable, key=lambda one: pipeline.steps[one])[len(usable) // 2]


def ranges(numbers: Sequence[int]) -> str:
    """Numbers in order, in words.

    >>> ranges([0, 1, 2, 3, 7, 9])
    '0 to 3, 7, 9'
    """
    found = []
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        found.append(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}")
    return ", ".join(found)


def _no_pipeline(run: Path) -> str:
    """Why there is nothing to draw."""
    events = run / "events"
    starts = list(read(run, ("start",)))
    if any(True for _ in read(run, ("cut",))):
        return (
            f"The run {run} has cut a model into stages, but its event files hold no step that all workers have "
            f"finished. If they trained on several machines, bring the files together in {events}."
        )
    if not starts:
        return f"The run {run} has no events of training: {events} holds no records of a session that has begun."
    strategy, workers = starts[-1].get("strategy"), starts[-1].get("workers")
    if strategy == "pipeline" and workers != 1:
        first = events / "rank-0.jsonl"
        if not first.exists():
            return (
                f"{first} is missing, and only the worker of rank 0 records how the model was cut. Its machine has it: "
                f"bring the event files of all machines together in {events}."
            )
        return (
            f"The run {run} has not cut its model yet, or the record of that is lost: {first} does not say how the "
            f"model was cut. Train some steps."
        )
    many = f"{workers} worker" + ("s" if workers != 1 else "")
    return (
        f"The run {run} trained with strategy {strategy!r} on {many}, without stages on different workers. The "
        f"timeline shows pipelines: paceline run -n 2 --set strategy=pipeline ..."
    )
