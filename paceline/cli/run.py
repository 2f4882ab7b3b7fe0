"""``paceline run``: train with a script on many workers, show how it goes, and say why it ended."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import BEFORE_SCRIPT, Arguments, Plan, Script, Set

if TYPE_CHECKING:
    from paceline.launch.base import Launch, Request
    from paceline.launch.local import Outcome

CONTEXT = BEFORE_SCRIPT
MORE_HELP = """ Options stand before the script; all that follows it is the script's own.

Exit code: 0 success, 1 the script failed (or its own code), 2 wrong usage or settings, 3 the workers could
not start, 4 checkpoint, 5 a worker was lost, 128 + signal.
"""


def command(  # noqa: PLR0913 - each argument is an option of the command line
    script: Script,
    arguments: Arguments = None,
    workers: Annotated[
        int, typer.Option("--workers", "-n", "-np", "--nproc-per-node", help="How many workers train.")
    ] = 1,
    set_: Set = None,
    resume: Annotated[
        str | None,
        typer.Option(help="auto: from the newest checkpoint, if there is one; or the path of a checkpoint."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run.", show_default="script-date-time")] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where the directories of the runs stand.")] = Path("runs"),
    plan: Plan = None,
    port: Annotated[int | None, typer.Option(help="Where the workers meet.", show_default="a free one")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Train with a script on many workers."""
    from paceline import config
    from paceline.launch.base import Request

    settings = config.parse_command_line(set_ or [])
    if resume is not None:
        settings["resume"] = resume
    request = Request(script, tuple(arguments or ()), workers, settings, plan, runs_dir, name, port)
    raise typer.Exit(train(request, quiet=quiet))


def train(request: Request, quiet: bool = False, closing: bool = True) -> int:
    """Start the workers, show their progress until they end, and report a failure; gives the exit code."""
    from paceline.cli.progress import display
    from paceline.launch.local import Workers
    from paceline.launch.prepare import prepare

    launch = prepare(request)
    shown = display(launch.run / "events" / "rank-0.jsonl", quiet)
    with Workers(launch, shown.show) as workers, shown:
        outcome = workers.wait()
    code = report(launch, outcome)
    if code != 0:
        _say_where(launch, request)
    elif closing and not quiet:
        _say(f"done in {outcome.seconds:.1f} s; output and checkpoints: {_short(launch.run)}")
    return code


def report(launch: Launch, outcome: Outcome, seen: int | None = 0) -> int:
    """Say why the workers ended, the first cause first; gives the exit code."""
    import signal

    from paceline.launch.failure import diagnose, explain

    if outcome.signal is not None:
        _say(f"stopped by {signal.Signals(outcome.signal).name}; all workers have ended")
        return 128 + outcome.signal
    diagnosis = diagnose(launch, outcome, seen)
    if diagnosis is None:
        return 0
    for line in explain(diagnosis, launch.workers):
        _say(line)
    return diagnosis.cause.exit_code


def _say_where(launch: Launch, request: Request) -> None:
    from paceline.launch.runs import newest_manifest

    _say(f"output of every worker: {_short(launch.run / 'output')}")
    if newest_manifest(launch.run) is not None:
        _say(f"resume with: {resume_command(launch, request)}")


def resume_command(launch: Launch, request: Request) -> str:
    """The command that continues this run from its newest checkpoint."""
    words = ["paceline", "run", "-n", str(request.workers), "--name", launch.run.name, "--resume", "auto"]
    if request.runs != Path("runs"):
        words += ["--runs-dir", str(request.runs)]
    if request.plan is not None:
        words += ["--plan", str(request.plan)]
    for key, value in request.settings.items():
        if key != "resume":
            words += ["--set", f"{key}={value}"]
    return shlex.join([*words, str(request.script), *request.arguments])


def _short(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
