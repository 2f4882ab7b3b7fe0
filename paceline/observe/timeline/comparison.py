"""Comparison of a pipeline step as predicted and as measured, with the time that workers waited for each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from paceline.errors import ConfigError, InputError
from paceline.observe.records import read
from paceline.observe.timeline.completeness import complete_steps
from paceline.observe.timeline.pipelines import KINDS, Pipeline, RecordedOperation, operations_of, pipelines_of
from paceline.observe.timeline.timelines import layout_of, measured, predicted, schedule_of
from paceline.observe.timeline.times import median_times, profiled_times
from paceline.schedule.pipeline.clock import TRANSFERS, Timeline, Times
from paceline.schedule.pipeline.operations import Kind, Schedule
from paceline.schedule.pipeline.proof import prove

_WARM = 3  # number of initial steps that are not chosen by default
_NEAR = 20  # number of steps before and after a step that count in the median times
_ON_MICROBATCHES = KINDS.keys() - {"reduce", "update"}


@dataclass(frozen=True)
class Comparison:
    """A step, predicted and measured."""

    run: Path
    pipeline: Pipeline  # cut of the model at that time
    step: int
    schedule: Schedule
    times: Times  # durations of operations used by the prediction
    median_times: Times  # median durations measured around this step
    predicted: Timeline  # timeline predicted by the clock
    measured: Timeline  # timeline from the records

    @property
    def from_profile(self) -> bool:
        """Whether the prediction uses times profiled before training. Otherwise it uses the median times."""
        return self.pipeline.times is not None

    @property
    def activations(self) -> tuple[int, ...]:
        """Maximum number of activations that each worker keeps at a time, in microbatches and stages."""
        return prove(self.schedule).activations

    @property
    def source(self) -> str:
        """Source of the times in the prediction, in words."""
        if not self.from_profile:
            return (
                "Predicted from the median time of each operation in the steps around this one. The layers were not "
                "measured before training, as the cut was given."
            )
        splits = Kind.WEIGHT in {one.kind for operations in self.schedule.workers for one in operations}
        split = " Each part of a split backward pass counts as half of it." if splits else ""
        return (
            "Predicted from the times of the layers measured before training; transfers and updates count "
            f"as free.{split}"
        )

    @property
    def waits(self) -> tuple[dict[int, float], ...]:
        """Seconds that each worker waited for each other worker, to receive or to send."""
        found: list[dict[int, float]] = [defaultdict(float) for _ in self.measured.workers]
        for worker, spans in enumerate(self.measured.workers):
            for (kind, _, microbatch, _, peer), begin, end in spans:
                if kind in TRANSFERS:
                    found[worker][self.schedule.worker_of(peer, microbatch)] += end - begin
        return tuple(found)

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds in which each worker neither computed nor waited for another."""
        spent = zip(self.measured.busy, self.waits, strict=True)
        return tuple(max(0.0, self.measured.seconds - busy - sum(waits.values())) for busy, waits in spent)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a worker holds, even stages without a microbatch in this step."""
        return layout_of(self.pipeline).stages_of(rank)

    @property
    def launches(self) -> bool:
        """Whether the durations of operations are those of kernel launches, as on a GPU."""
        return self.pipeline.device == "cuda"


def compare(run: Path, step: int | None = None) -> Comparison:
    """Compare prediction and measurement for a step of a run, in the newest pipeline that has the step.

    Args:
        step: step number. Defaults to a step of median length in the newest pipeline.

    Raises:
        ConfigError: the step does not exist, or some of its records are missing.
    """
    pipelines = [one for one in pipelines_of(read(run, ("cut", "step"))) if one.finished_steps]
    if not pipelines:
        raise InputError(_no_pipeline(run))
    pipeline, step = _chosen(run, pipelines, step)
    operations = _near(run, pipeline, step)
    as_it_was = measured(pipeline, operations, step)
    medians = median_times(operations, len(pipeline.stages))
    times = profiled_times(pipeline) or medians
    schedule = schedule_of(pipeline, operations, step)
    by_the_clock = predicted(pipeline, operations, step, schedule, times)
    return Comparison(run, pipeline, step, schedule, times, medians, by_the_clock, as_it_was)


def _near(run: Path, pipeline: Pipeline, step: int) -> list[RecordedOperation]:
    """Return the operations of the steps around a step, sorted by their beginning."""
    records = read(run, KINDS, range(step - _NEAR, step + _NEAR + 1))
    return sorted(operations_of(records, pipeline), key=lambda one: one.span.begin)


def _chosen(run: Path, pipelines: Sequence[Pipeline], step: int | None) -> tuple[Pipeline, int]:
    """Return the newest pipeline that has the step. Read all records only if some records of the step are missing."""
    newest = next((one for one in reversed(pipelines) if step is None or step in one.finished_steps), None)
    if newest is not None:
        wanted = _usual(newest, newest.finished_steps) if step is None else step
        if wanted in complete_steps(_near(run, newest, wanted), newest):
            return newest, wanted
    complete = [(one, complete_steps(operations_of(read(run, _ON_MICROBATCHES), one), one)) for one in pipelines]
    last = {number: place for place, one in enumerate(pipelines) for number in one.finished_steps}
    there = sorted(number for place, (_, steps) in enumerate(complete) for number in steps if last[number] == place)
    if not there:
        raise InputError(
            f"No step of {run} can be drawn: each lacks records of operations, lost on a full disk. Free some space "
            f"in {run / 'events'} and train some more steps."
        )
    if step is None:
        return next((pipeline, _usual(pipeline, steps)) for pipeline, steps in reversed(complete) if steps)
    why = "records of its operations are missing" if newest is not None else "this step cannot be drawn"
    raise ConfigError(f"--step {step}: {why}. Steps that can{' be drawn' if newest else ''}: {ranges(there)}.")


def _usual(pipeline: Pipeline, steps: Sequence[int]) -> int:
    """Return the step of median length, leaving out the first steps."""
    usable = steps[_WARM:] or steps[-1:]
    return sorted(usable, key=lambda one: pipeline.steps[one])[len(usable) // 2]


def ranges(numbers: Sequence[int]) -> str:
    """Format sorted numbers as ranges, in words.

    >>> ranges([0, 1, 2, 3, 7, 9])
    '0 to 3, 7, 9'
    """
    found = []
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        found.append(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}")
    return ", ".join(found)


def _no_pipeline(run: Path) -> str:
    """Explain why there is nothing to draw."""
    events = run / "events"
    starts = list(read(run, ("start",)))
    if any(True for _ in read(run, ("cut",))):
        return (
            f"The run {run} cut a model into stages, but its event files hold no step that all workers finished. If "
            f"they ran on several machines, collect the files in {events}."
        )
    if not starts:
        return f"The run {run} has no events of training: {events} holds no record of a session."
    strategy, workers = starts[-1].get("strategy"), starts[-1].get("workers")
    if strategy == "pipeline" and workers != 1:
        first = events / "rank-0.jsonl"
        if not first.exists():
            return (
                f"{first} is missing, and only rank 0 records how the model was cut. It is on the machine of rank 0: "
                f"collect the event files of all machines in {events}."
            )
        return (
            f"The run {run} has not cut its model yet, or the record of it is lost: {first} has no event 'cut'. Train "
            f"some steps."
        )
    many = f"{workers} worker" + ("s" if workers != 1 else "")
    return (
        f"The run {run} trained with strategy {strategy!r} on {many}, without stages on different workers. "
        f"Timelines show pipelines: paceline run -n 2 --set strategy=pipeline ..."
    )
