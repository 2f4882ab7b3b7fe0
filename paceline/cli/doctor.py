"""``paceline doctor``: find problems of the machines before a run starts."""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.display import table
from paceline.cli.options import MachineOptions, chosen_place, takes
from paceline.cli.report import say
from paceline.environments import env
from paceline.errors import ConfigError, StartError, counted
from paceline.launchers.base import Examination, Request
from paceline.launchers.local.child import end_with_parent
from paceline.observe.records import printable

if TYPE_CHECKING:
    from paceline.diagnostics.doctor.diagnosis import Diagnosis
    from paceline.diagnostics.doctor.finding import Finding
    from paceline.launchers.clusters.base import Options

CONTEXT: dict[str, object] = {}
MORE_HELP = " On the machines of -H, --hostfile or --on it starts itself. Exit code: 1 if a run would fail."


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(MachineOptions):
    """Options of ``paceline doctor``."""

    script: Annotated[
        Path | None, typer.Argument(help="The script that will train.", metavar="SCRIPT", show_default=False)
    ] = None
    data: Annotated[Path | None, typer.Option(help="File or folder of the data set, to compare on all machines.")] = (
        None
    )
    checkpoints: Annotated[Path | None, typer.Option(help="Folder for checkpoints, which all machines must share.")] = (
        None
    )
    patience: Annotated[float, typer.Option(help="Seconds to wait for the other machines.")] = 60.0
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show all checks, not only problems.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False


@takes(DoctorOptions)
def command(given: DoctorOptions) -> None:
    """Find problems before a run starts."""
    from paceline.launchers.clusters.registry import LOCAL

    options = given.of_cluster()
    place = chosen_place(given.on, options, given.rendezvous, quiet=given.as_json)
    workers = 1 if given.workers is None else given.workers
    if workers < 0 or (workers < 1 and given.rendezvous is None):
        raise ConfigError(f"--workers {workers}: at least one worker must train.")
    if not 0 <= given.patience <= 1e6:
        raise ConfigError(f"--patience {given.patience}: give a number of seconds from 0 to 1000000.")
    request = Request(
        script=Path(),
        workers=workers,
        runs=given.runs_dir,
        patience_seconds=given.patience,
        nodes=given.machines(place == LOCAL),
        rendezvous=given.rendezvous,
        secret_file=given.secret_file,
        examination=Examination(given.script, given.data, given.checkpoints, given.verbose, given.as_json),
    )
    if place != LOCAL:
        raise typer.Exit(_examine_in(place, request, options, given.dry_run))
    raise typer.Exit(_examine_here(request))


def _examine_in(name: str, request: Request, options: Options, dry_run: bool) -> int:
    """Run the doctor in agents on a cluster's machines and return the exit code of the first machine's doctor."""
    from paceline.diagnostics.doctor.diagnosis import not_started
    from paceline.launchers.clusters.registry import place_named

    place = place_named(name)()
    if not place.examines:
        raise ConfigError(
            f"--on {name}: the doctor cannot be started there from here. Start `paceline doctor` on its machines, with "
            f"--nodes and --rendezvous."
        )
    placement = place.decide(request, options, env.inherited())
    if dry_run:
        print(placement.text)
        return 0
    by = {env.USER_COMMAND: shlex.join(["paceline", "doctor", "--on", name, *options.words()])}
    agents = tuple(replace(one, environment={**one.environment, **by}) for one in placement.agents)
    try:
        return place.carry_out(replace(placement, agents=agents), request)
    except StartError as error:
        found = not_started(str(error))
        _show(found, request)
        return found.code


def _examine_here(request: Request) -> int:
    """Examine this machine, alone or at a rendezvous. Agents of a cluster leave the report to the first machine."""
    from paceline.diagnostics.doctor.diagnosis import examine
    from paceline.diagnostics.doctor.examine import Wanted

    if env.text(env.END_WITH_PARENT):
        end_with_parent()
    assert request.examination is not None
    wanted = Wanted(
        workers=max(1, request.workers),
        machines=request.nodes[1] if request.nodes else 1,
        host=socket.gethostname(),
        runs=request.runs,
        given=request.examination,
    )
    found = examine(wanted, request.rendezvous, request.secret_file, request.patience_seconds, say)
    if env.text(env.USER_COMMAND) is None or found.first:
        _show(found, request)
    elif found.elsewhere is None:
        say(_text(found, request.examination))
    if file := env.path(env.EXIT_CODE_FILE):  # a nonzero code makes mpiexec end the others and print a lot
        with contextlib.suppress(OSError):  # the folder is on another machine
            if found.first:
                file.write_text(str(found.code))
            return 0
    return found.code


def _show(found: Diagnosis, request: Request) -> None:
    assert request.examination is not None
    if request.examination.as_json:
        print(to_json(found))
    else:
        print(_text(found, request.examination))


def to_json(found: Diagnosis) -> str:
    from paceline.diagnostics.doctor import finding

    whole = {"code": found.code, "machines": found.machines, "report_on": found.elsewhere}
    return json.dumps({**whole, "findings": finding.to_json(found.findings)}, indent=2)


def shown(found: Diagnosis, verbose: bool) -> list[str]:
    """Return the findings as lines for the user, with all problems in full and failures first."""
    if found.elsewhere is not None:
        result = "there are failures" if found.code else "nothing fails"
        return [f"{result}; the report is on {found.elsewhere}"]
    wrong = [one for status in ("failure", "warning") for one in found.findings if one.status == status]
    lines = [line for one in wrong for line in _explained(one)]
    if verbose:
        rows = [("check", "where", "result", "found")]
        rows += [(one.check, one.place or "all", one.status, one.values) for one in found.findings]
        lines = [*table.lines(rows), "", *lines]
    failures = sum(one.status == "failure" for one in wrong)
    count = sum(one.status != "skipped" for one in found.findings)
    return [
        *lines,
        f"{count} checks on {counted(len(found.machines), 'machine')} ({', '.join(found.machines)}): "
        f"{counted(failures, 'failure')}, {counted(len(wrong) - failures, 'warning')}",
    ]


def _explained(one: Finding) -> list[str]:
    place = f" [{one.place}]" if one.place else ""
    return [f"{one.status.upper()}{place} {one.check}: {one.values}", f"  why: {one.why}", f"  do:  {one.cure}", ""]


def _text(found: Diagnosis, wanted: Examination) -> str:
    """Return the findings as text. Some of it comes from other machines, so control characters are escaped."""
    return "\n".join(map(printable, shown(found, wanted.verbose)))
