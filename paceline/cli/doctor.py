"""``paceline doctor``: what would go wrong on these machines, before a run starts."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.doctor.diagnosis import Diagnosis
    from paceline.doctor.finding import Finding

CONTEXT: dict[str, object] = {}
MORE_HELP = " With --nodes run it on every machine, as paceline run. Exit code: 1 if a run would fail."


def command(  # noqa: PLR0913 - each argument is an option of the command line
    script: Annotated[
        Path | None, typer.Argument(help="The script that will train.", metavar="[SCRIPT]", show_default=False)
    ] = None,
    workers: Annotated[int, typer.Option("--workers", "-n", "-np", help="Workers that will start here.")] = 1,
    nodes: Annotated[
        str | None, typer.Option("--nodes", "--nnodes", help="How many machines take part.", metavar="N")
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(help="Where machines meet: the first one's name and a free port.", metavar="HOST:PORT"),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(help="The secret of the machines' runs, the same on all; made if it is not there."),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="The file or folder of the data set: is it alike on all?")] = None,
    checkpoints: Annotated[
        Path | None, typer.Option(help="The folder for checkpoints: do all machines share it?")
    ] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where the run directories are.")] = Path("runs"),
    patience: Annotated[float, typer.Option(help="Seconds to wait for the other machines.")] = 60.0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show all checks, not only what is wrong.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Find what would go wrong, before a run starts."""
    from paceline.cli.report import say
    from paceline.cli.run import node_range
    from paceline.doctor.diagnosis import examine
    from paceline.doctor.examine import Wanted
    from paceline.errors import ConfigError

    machines = node_range(nodes, rendezvous, local=True)
    if workers < 1:
        raise ConfigError(f"--workers {workers}: at least one worker must train.")
    if not 0 <= patience <= 1e6:
        raise ConfigError(f"--patience {patience}: give a number of seconds from 0 to 1000000.")
    wanted = Wanted(
        workers=workers,
        machines=machines[1] if machines else 1,
        host=socket.gethostname(),
        runs=runs_dir,
        script=script,
        data=data,
        checkpoints=checkpoints,
    )
    found = examine(wanted, rendezvous, secret_file, patience, say)
    if as_json:
        print(to_json(found))
    else:
        print(_printable("\n".join(shown(found, verbose))))
    raise typer.Exit(found.code)


def to_json(found: Diagnosis) -> str:
    """Write the findings for programs."""
    from paceline.doctor import finding

    whole = {"code": found.code, "machines": found.machines, "report_on": found.elsewhere}
    return json.dumps({**whole, "findings": finding.to_json(found.findings)}, indent=2)


def shown(found: Diagnosis, verbose: bool) -> list[str]:
    """Write the findings for people: what is wrong in full, failures first."""
    from paceline.cli import table

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
        f"{count} checks on {_number(len(found.machines), 'machine')} ({', '.join(found.machines)}): "
        f"{_number(failures, 'failure')}, {_number(len(wrong) - failures, 'warning')}",
    ]


def _explained(one: Finding) -> list[str]:
    place = f" [{one.place}]" if one.place else ""
    return [f"{one.status.upper()}{place} {one.check}: {one.values}", f"  why: {one.why}", f"  do:  {one.cure}", ""]


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _printable(text: str) -> str:
    """Replace what a terminal would obey: some of it comes from other machines."""
    return "".join(one if one.isprintable() or one == "\n" else "?" for one in text)
