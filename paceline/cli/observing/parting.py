"""``paceline verify RUN RUN``: find the first step in which two runs differ, and the value that differs first."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import InputError

if TYPE_CHECKING:
    from paceline.diagnostics.replay.recorded import RecordedRun
    from paceline.diagnostics.verify.run_trace import RunTrace


def compare(runs_dir: Path, first: str, second: str) -> int:
    """Compare two runs, and print where they begin to differ. Return the exit code: 0 if they are equal, else 1."""
    from paceline.diagnostics.replay import parting, recorded
    from paceline.launchers.runs import found

    one, two = (recorded.load(found(runs_dir, name).resolve()) for name in (first, second))
    step = parting.first_recorded(one, two)
    if not (common := one.steps.keys() & two.steps.keys()):
        has = (f"{run.folder.name} has {run.range_of_steps()}" for run in (one, two))
        raise InputError(f"The runs have no step in common: {', '.join(has)}.")
    if step is None:
        missing = "" if len(common) == len(one.steps) == len(two.steps) else ", all that both have"
        print(f"The same bits in {len(common)} steps{missing}.")
        return 0
    print(f"The records differ from step {step} on: {one.steps[step].difference(two.steps[step])}")
    for line in parting.changes(one, two):
        print(f"different at the start: {line}")
    if not (one.same_bits and two.same_bits):
        print("Their bits depend on the number of workers, as exact is not set, so no replay finds the parameter.")
        return 1
    print(_first_value(one, two, step))
    return 1


def _first_value(one: RecordedRun, two: RecordedRun, step: int) -> str:
    """Replay both runs, and return a sentence with the first value that differs."""
    from paceline.diagnostics.replay.parting import first_of
    from paceline.diagnostics.verify.compare import compare as compared

    known: dict[int, tuple[RunTrace, RunTrace]] = {}

    def traces(at: int) -> tuple[RunTrace, RunTrace]:
        if at not in known:
            known[at] = _trace(one, at), _trace(two, at)
        return known[at]

    def states(at: int, record: int) -> bool:
        """Return whether the states differ before the step (record 0) or after it (1)."""
        mine, theirs = (trace.records[record].state for trace in traces(at))
        return mine != theirs

    if not states(step, 1):
        return (
            f"Replays of both runs are equal after step {step}, so one of them was not trained by its script alone: "
            f"replay each to see which one does not reproduce its recorded bits. Look for a faulty machine."
        )
    if states(step, 0) and not (step and states(0, 0)):
        step = first_of(-1, step, lambda at: states(at, 1))
    first = compared(*traces(step)).first
    assert first is not None
    where = "before" if first.step < 0 else "in"
    values = f": {first.reference} and {first.other}" if isinstance(first.reference, float | int) else ""
    return f"The first value that differs {where} step {step} is the {first.kind} {first.name}".rstrip() + values


def _trace(run: RecordedRun, step: int) -> RunTrace:
    from paceline.cli.observing.replay import replayed
    from paceline.diagnostics.verify.run_trace import read

    with (
        tempfile.TemporaryDirectory(prefix="paceline-trace-") as directory,
        replayed(run, step, 1, "trace", Path(directory)),
    ):
        return read(Path(directory) / "trace.jsonl")
