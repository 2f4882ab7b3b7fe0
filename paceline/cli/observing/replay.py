"""``paceline replay``: repeat a step of a run with the same bits, and look at it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.observing.logs import Run, RunsDir

if TYPE_CHECKING:
    from paceline.diagnostics.replay.recorded import RecordedRun, RecordedStep
    from paceline.launchers.base import Request
    from paceline.observe.records import Record

CONTEXT: dict[str, object] = {}
MORE_HELP = """ It starts from the nearest checkpoint, and writes none.

Exit code: 0 if the replayed steps have the recorded bits, else 1; or that of the script, if it fails.
"""
_SHOWN_SAMPLES = 20


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
    from paceline.errors import ConfigError
    from paceline.launchers.runs import found

    asked = [name for name, is_asked in _observers(anomaly, samples, profile, pdb).items() if is_asked]
    if len(asked) > 1:
        raise ConfigError(f"Give one of --{' and --'.join(asked)}, not both.")
    known = recorded.load(found(runs_dir, run).absolute())
    with replayed(known, step, ranks, asked[0] if asked else "") as (records, code):
        for record in records:
            _LINES.get(record["event"], _nothing)(record)
        if not _compare(known, step, records) and not code:
            raise typer.Exit(1)
        raise typer.Exit(code)


def _observers(anomaly: bool, samples: bool, profile: bool, pdb: bool) -> dict[str, bool]:
    return {"anomaly": anomaly, "samples": samples, "profile": profile, "pdb": pdb}


@contextmanager
def replayed(
    known: RecordedRun, step: int, ranks: int | None, observe: str, traces: Path | None = None
) -> Iterator[tuple[list[Record], int]]:
    """Replay a run up to a step, and yield the records of the replay and its exit code.

    Raises:
        ConfigError, InputError: the step cannot be replayed.
    """
    from paceline.environments import env
    from paceline.launchers.base import Request
    from paceline.observe import records

    known.check(step)
    start, checkpoint = known.checkpoint_before(step)
    workers = _workers(known, step, ranks, observe)
    settings = {key: value for key, value in known.launch["settings"].items() if key != "resume"}
    if checkpoint is not None:
        settings["resume"] = str(checkpoint)
    asked = {"step": step, "observe": observe, "directory": str(traces or known.folder)}
    with tempfile.TemporaryDirectory(prefix="paceline-replay-") as directory, _working_in(known.launch):
        request = Request(
            known.script,
            tuple(known.launch["arguments"]),
            workers,
            settings,
            Path(known.launch["plan"]) if known.launch.get("plan") else None,
            runs=Path(directory),
            name=known.folder.name,
            environment={env.REPLAY: json.dumps(asked), "OMP_NUM_THREADS": str(known.launch.get("threads", 1))},
        )
        _say(f"replaying {known.folder.name} from {checkpoint.name if checkpoint else 'the start'} on {_count(workers)}")
        code = _run(request, interactive=observe == "pdb")
        yield [*records.read(Path(directory) / known.folder.name, _WANTED, range(start, step + 1))], code


def _workers(known: RecordedRun, step: int, ranks: int | None, observe: str) -> int:
    """Return the number of workers of a replay."""
    from paceline.errors import ConfigError

    recorded = known.workers_at(step)
    workers = ranks or (1 if known.same_bits else recorded)
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks {ranks}: at least one worker must train.")
    if workers != recorded and not known.same_bits:
        raise ConfigError(
            f"--ranks {workers}: the bits of {known.folder.name} depend on its {_count(recorded)}, as exact is not set, "
            f"or batch_per_worker or scale_lr is. Leave out --ranks."
        )
    if observe == "pdb" and workers > 1:
        raise ConfigError(f"--pdb debugs one worker, and this is a replay on {workers}: with exact, set --ranks 1.")
    return workers


def _count(workers: int) -> str:
    return f"{workers} worker{'s' * (workers > 1)}"


@contextmanager
def _working_in(launch: Any) -> Iterator[None]:
    """Work in the directory from which the run was started, if it is there."""
    before = Path.cwd()
    if Path(str(launch.get("directory"))).is_dir():
        os.chdir(launch["directory"])
    try:
        yield
    finally:
        os.chdir(before)


def _run(request: Request, interactive: bool) -> int:
    """Run the script up to the step, and return the exit code, 0 if it did not fail."""
    from paceline.cli.report import report, say
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
        print(f"step {step}: the replay did not complete it")
        return step not in known.steps
    if step not in known.steps:
        print(f"step {step}: the run has no record of it to compare with")
        return True
    loss, norm = float.fromhex(steps[step].loss), float.fromhex(steps[step].norm)
    print(f"step {step}: the same bits as recorded: loss {loss:.6g}, gradient norm {norm:.6g}, {steps[step].chain}")
    return True


def replayed_steps(records: Sequence[Record]) -> dict[int, RecordedStep]:
    """Return the steps of a replay by number."""
    from paceline.diagnostics.replay.recorded import steps_in

    return steps_in([record for record in records if record["event"] == "step"])


def _print_anomaly(record: Record) -> None:
    if not record["found"]:
        print(f"step {record['step']}, rank {record['rank']}: all values and gradients are finite")
    for one in record["found"]:
        many = "s" * (len(one["samples"]) > 1)
        where = f"sample{many} {', '.join(map(str, one['samples']))} (microbatch {one['microbatch']})"
        operation = f"; {one['operation']}" if one["operation"] else ""
        print(f"step {record['step']}, {where}: not finite in the {one['pass']} pass, layer {one['layer']}{operation}")


def _print_samples(record: Record) -> None:
    from paceline.cli.display import table

    ranked = sorted(record["found"], key=lambda one: (one["loss"] == one["loss"], -one["loss"]))
    rows = [("sample", "microbatch", "loss")]
    rows += [(str(one["sample"]), str(one["microbatch"]), f"{one['loss']:.6g}") for one in ranked]
    print("\n".join(table.lines(rows)))


def _print_profile(record: Record) -> None:
    print(f"{record['text']}\nrank {record['rank']}: {record['path']}, for Perfetto")


def _nothing(_: Record) -> None:
    """Print nothing of a record."""


def _say(text: str) -> None:
    from paceline.cli.report import say

    say(text)


_LINES = {"anomaly": _print_anomaly, "samples": _print_samples, "profile": _print_profile}
_WANTED = ("step", *_LINES)
