"""``paceline replay``: repeat a step of a run with the same bits, and look at it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.display import table
from paceline.cli.observing.logs import Run, RunsDir
from paceline.cli.report import report, say
from paceline.environments import env
from paceline.errors import ConfigError, counted
from paceline.launchers.base import Request

if TYPE_CHECKING:
    from paceline.diagnostics.replay.recorded import RecordedRun, RecordedStep
    from paceline.observe.records import Record

CONTEXT: dict[str, object] = {}
MORE_HELP = """ It starts from the nearest checkpoint, and writes none.

Exit code: 0 if the replayed steps have the recorded bits, otherwise 1; 2 if the step cannot be replayed.
"""


def command(  # noqa: PLR0913 - each argument is an option
    run: Run = None,
    step: Annotated[int, typer.Option(help="The step, from 0.")] = ...,  # type: ignore[assignment]
    ranks: Annotated[
        int | None, typer.Option(help="Workers; 1 if exact is set, otherwise as many as the run had.")
    ] = None,
    anomaly: Annotated[
        bool, typer.Option("--anomaly", help="Find the sample and the layer of a NaN or an infinite value.")
    ] = False,
    samples: Annotated[bool, typer.Option("--samples", help="Rank the samples of the step by their loss.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Profile the step by torch.profiler.")] = False,
    pdb: Annotated[bool, typer.Option("--pdb", help="Stop in the debugger before the step.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Repeat a step of a run with the same bits."""
    from paceline.diagnostics.replay import recorded
    from paceline.launchers.runs import found

    observers = {"anomaly": anomaly, "samples": samples, "profile": profile, "pdb": pdb}
    asked = [name for name, is_asked in observers.items() if is_asked]
    if len(asked) > 1:
        raise ConfigError(f"Give one of --{' and --'.join(asked)}, not both.")
    known = recorded.load(found(runs_dir, run).resolve())
    with replayed(known, step, ranks, asked[0] if asked else "") as (records, code):
        for event, lines_of in _LINES.items():
            for line in lines_of(known, [record for record in records if record["event"] == event]):
                print(line)
        if not _compare(known, step, records) and not code:
            raise typer.Exit(1)
        raise typer.Exit(code)


@contextmanager
def replayed(
    known: RecordedRun, step: int, ranks: int | None, observe: str, traces: Path | None = None
) -> Iterator[tuple[list[Record], int]]:
    """Replay a run up to a step, and yield the records of the replay and its exit code.

    Raises:
        ConfigError, InputError: the step cannot be replayed.
    """
    from paceline.observe import records

    known.check(step)
    start, checkpoint = known.checkpoint_before(step)
    workers = _workers(known, step, ranks, observe)
    settings = known.settings_of(step)
    if checkpoint is not None:
        settings["resume"] = str(checkpoint)
    asked = {"step": step, "observe": observe, "directory": str(traces or known.folder)}
    directory = Path(tempfile.mkdtemp(prefix="paceline-replay-"))
    with _working_in(known.launch):
        request = Request(
            known.script,
            tuple(known.launch["arguments"]),
            workers,
            settings,
            runs=directory,
            name=known.folder.name,
            environment={env.REPLAY: json.dumps(asked), "OMP_NUM_THREADS": str(known.launch.get("threads", 1))},
        )
        say(
            f"replaying {known.folder.name} from {checkpoint.name if checkpoint else 'the start'} on "
            f"{counted(workers, 'worker')}; {known.script.name} runs in {Path.cwd()}, and writes its own files there "
            f"again"
        )
        code = _run(request, interactive=observe == "pdb")
    try:
        yield [*records.read(directory / known.folder.name, ["step", *_LINES], range(start, step + 1))], code
    finally:
        if not code:  # otherwise the report of the failure names files in it
            shutil.rmtree(directory, ignore_errors=True)


def _workers(known: RecordedRun, step: int, ranks: int | None, observe: str) -> int:
    recorded = known.workers_at(step)
    had = counted(recorded, "worker")
    others = {known.workers_at(one) for one in range(known.checkpoint_before(step)[0], step)} - {recorded}
    if others and not known.same_bits:
        raise ConfigError(
            f"--step {step}: {known.folder.name} had {had} there and {counted(max(others), 'worker')} at an earlier "
            f"step after the nearest checkpoint. Its bits depend on the number of workers, because exact is not set, "
            f"so no replay can repeat them."
        )
    workers = ranks or (1 if known.same_bits else recorded)
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks {ranks}: at least one worker must train.")
    if workers != recorded and not known.same_bits:
        raise ConfigError(
            f"--ranks {workers}: the bits of {known.folder.name} depend on its {had}, because exact is "
            f"not set, or batch_per_worker or scale_lr is. Leave out --ranks."
        )
    if observe == "pdb" and workers > 1:
        raise ConfigError(f"--pdb debugs one worker, and this is a replay on {workers}: with exact, set --ranks 1.")
    return workers


@contextmanager
def _working_in(launch: Any) -> Iterator[None]:
    """Return a context that works in the directory from which the run was started, if it still exists."""
    before = Path.cwd()
    if Path(str(launch.get("directory"))).is_dir():
        os.chdir(launch["directory"])
    try:
        yield
    finally:
        os.chdir(before)


def _run(request: Request, interactive: bool) -> int:
    """Run the script up to the step and return its exit code."""
    from paceline.launchers.prepare import prepare
    from paceline.launchers.workers import Workers

    with prepare(request) as launch:
        if interactive:
            worker = launch.worker(0, 0)
            return subprocess.call(worker.command, env=dict(worker.environment))
        with Workers(launch, lambda name, line: None, note=say) as running:
            result = running.wait()
        return report(launch, result, None, seen=None)


def _compare(known: RecordedRun, step: int, records: Sequence[Record]) -> bool:
    """Compare the steps of the replay with those of the run, and print the result. Return whether they are equal."""
    steps = replayed_steps(records)
    for number in sorted(steps):
        if number in known.steps and (text := known.steps[number].difference(steps[number])):
            print(f"step {number}: recorded and replayed differ in {text}")
            return False
    if step not in steps:
        print(
            f"step {step}: the replay did not complete it{'' if step in known.steps else ', and neither did the run'}"
        )
        return step not in known.steps
    if step not in known.steps:
        print(f"step {step}: the run has no record of it to compare with")
        return True
    loss, norm = float.fromhex(steps[step].loss), float.fromhex(steps[step].norm)
    print(f"step {step}: the same bits as recorded: loss {loss:.6g}, gradient norm {norm:.6g}, {steps[step].chain}")
    return True


def replayed_steps(records: Sequence[Record]) -> dict[int, RecordedStep]:
    from paceline.diagnostics.replay.recorded import steps_in

    return steps_in([record for record in records if record["event"] == "step"])


def _anomaly_lines(known: RecordedRun, records: Sequence[Record]) -> Iterator[str]:
    found = [(record["step"], one) for record in records for one in record["found"]]
    if records and not found:
        yield f"step {records[0]['step']}: all values and gradients are finite"
    for step, one in found:
        if one["pass"] != "parameters":
            yield f"step {step}, {_place(one)}"
            continue
        first = next((at for at in sorted(known.steps) if not known.steps[at].is_finite), None)
        where = f": replay step {first}, the first whose loss or gradient is not" if first not in (None, step) else ""
        yield f"step {step}: the parameter {one['layer']!r} is not finite before the step{where}"
        return


def _place(found: Record) -> str:
    many = "s" * (len(found["samples"]) > 1)
    where = f"sample{many} {', '.join(map(str, found['samples']))} (microbatch {found['microbatch']})"
    if found["pass"] == "data":
        return f"{where}: the data are not finite, layer {found['layer']} gets them first"
    operation = f"; {found['operation']}" if found["operation"] else ""
    return f"{where}: not finite in the {found['pass']} pass, layer {found['layer']}{operation}"


def _sample_lines(_: RecordedRun, records: Sequence[Record]) -> list[str]:
    found = [one for record in records for one in record["found"]]
    ranked = sorted(found, key=lambda one: (one["loss"] == one["loss"], -one["loss"]))  # NaN first
    rows = [(str(one["sample"]), str(one["microbatch"]), f"{one['loss']:.6g}") for one in ranked]
    return table.lines([("sample", "microbatch", "loss"), *rows]) if rows else []


def _profile_lines(_: RecordedRun, records: Sequence[Record]) -> Iterator[str]:
    for record in sorted(records, key=lambda one: -int(one["rank"])):
        yield from (record["text"], f"rank {record['rank']}: {record['path']}, for Perfetto")


_LINES = {"anomaly": _anomaly_lines, "samples": _sample_lines, "profile": _profile_lines}
