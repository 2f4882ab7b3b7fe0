"""Options that several commands share, and functions that interpret them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from paceline.cli.report import say
from paceline.environments import env
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.launchers.base import Request
    from paceline.launchers.clusters.base import Options

_Given = TypeVar("_Given")
BEFORE_SCRIPT = {"allow_interspersed_args": False}
"""Typer settings that pass everything after the script to the script, including options that Paceline also has."""

Script = Annotated[Path, typer.Argument(help="The script that trains.", metavar="SCRIPT", show_default=False)]
Arguments = Annotated[
    list[str] | None, typer.Argument(help="The script's own arguments.", metavar="ARGUMENTS", show_default=False)
]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="A setting, such as batch=64; may be repeated.", metavar="KEY=VALUE")
]
Plan = Annotated[
    Path | None,
    typer.Option("--plan", help="A TOML file with settings, or a plan saved by paceline plan.", metavar="FILE"),
]


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number. Give the number of workers, as in -n 4.") from None


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Options of the commands that start on one or several machines."""

    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-n",
            "-np",
            "--nproc-per-node",
            help="Number of workers on each machine.",
            parser=_whole_number,
            metavar="INTEGER",
            show_default="1, or those of a saved plan",
        ),
    ] = None
    nodes: Annotated[
        str | None,
        typer.Option(
            "--nodes", "--nnodes", help="Number of machines, or fewest and most, as in 1:3.", metavar="[MIN:]MAX"
        ),
    ] = None
    rendezvous: Annotated[
        str | None,
        typer.Option(
            help="Where machines meet: a name of the first machine, and a free port on it.", metavar="HOST:PORT"
        ),
    ] = None
    secret_file: Annotated[
        Path | None, typer.Option(help="File with the secret of all machines; the first machine creates it.")
    ] = None
    runs_dir: Annotated[Path, typer.Option(help="Folder of the run directories.")] = Path("runs")
    on: Annotated[
        str | None,
        typer.Option(
            help="Where to start: local, or a place such as ssh.", metavar="PLACE", show_default="where this process is"
        ),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, and start nothing.")] = False
    hosts: Annotated[
        str | None, typer.Option("--hosts", "-H", help="ssh, mpi: hosts and their workers, as in h1:4,h2:2.")
    ] = None
    hostfile: Annotated[Path | None, typer.Option(help="ssh, mpi: a file of hosts: lines such as h1 slots=4.")] = None
    gpus: Annotated[int | None, typer.Option(help="slurm, ray, kubernetes: GPUs of each machine.")] = None
    address: Annotated[str | None, typer.Option(help="ray: the cluster.")] = None
    master: Annotated[str | None, typer.Option(help="spark: the cluster, as in spark://host:7077.")] = None

    def of_cluster(self) -> Options:
        from paceline.launchers.clusters.base import Options

        given = {one.name: getattr(self, one.name) for one in fields(Options) if hasattr(self, one.name)}
        return Options(**given)

    def machines(self, local: bool) -> tuple[int, int] | None:
        """Return the minimum and maximum number of machines, or None if ``--nodes`` is not given."""
        if self.secret_file is not None and self.rendezvous is None and local:
            raise ConfigError("--secret-file is for several machines: give --rendezvous and --nodes, too.")
        return node_range(self.nodes, self.rendezvous, local)


def takes(options: type[_Given]) -> Callable[[Callable[[_Given], None]], Callable[..., None]]:
    """Return a decorator that collects a command's typer options into one ``options`` object."""
    hints = get_type_hints(options, include_extras=True)
    parameters = [one.replace(annotation=hints[one.name]) for one in signature(options).parameters.values()]

    def decorate(function: Callable[[_Given], None]) -> Callable[..., None]:
        @wraps(function)
        def command(**given: Any) -> None:
            function(options(**given))

        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = hints
        return command

    return decorate


def chosen_place(on: str | None, options: Options, rendezvous: str | None, quiet: bool) -> str:
    """Return the name of the requested cluster, of the cluster that this process runs on, or ``local``."""
    from paceline.launchers.clusters import base, registry

    place = on or ("ssh" if options.hosts or options.hostfile else None)
    if place is None and rendezvous is None and (found := registry.find(env.inherited())):
        place, reason = found
        if not quiet:
            say(f"--on {place}: {reason}")
    place = place or registry.LOCAL
    if place == registry.LOCAL and options.given():
        raise ConfigError(f"--{options.given()[0]} is an option of a place: name the place with --on.")
    if place != registry.LOCAL:
        base.check_options(place, registry.place_named(place), options)
    return place


def place_of_discovered(script: Path, place: str, elastic: str | None, nodes: str | None, options: Options) -> str:
    """Return the cluster for the hosts that a discovery script names: this machine, or ssh."""
    from paceline.launchers.clusters.discovery import ask, is_loopback_alone
    from paceline.launchers.clusters.registry import LOCAL

    if elastic is None or nodes is not None or place not in (LOCAL, "ssh") or options.hosts or options.hostfile:
        raise ConfigError(
            "--host-discovery-script names the hosts of an elastic run, here or by ssh: give --elastic MIN:MAX, and "
            "leave out --nodes, --hosts and other places."
        )
    return place if is_loopback_alone(ask(script)) else "ssh"


def node_range(nodes: str | None, rendezvous: str | None, local: bool) -> tuple[int, int] | None:
    """Parse ``--nodes`` into the minimum and maximum number of machines. None if the option is not given."""
    from paceline.config import quoted

    if rendezvous is not None and not local:
        raise ConfigError(
            "--rendezvous is for machines on which you start paceline run yourself: leave out either it or --on."
        )
    if local and (nodes is None) != (rendezvous is None):
        raise ConfigError("--nodes and --rendezvous belong together: the number of machines, and where they meet.")
    if nodes is None:
        return None
    first, _, last = nodes.rpartition(":")
    if (found := number_range(first or last, last)) is None:
        raise ConfigError(f"--nodes {quoted(nodes)}: give a number of machines, or the fewest and the most, as in 1:3.")
    return found


def number_range(first: str, last: str) -> tuple[int, int] | None:
    """Parse two whole numbers from 1, each of at most nine digits. None if invalid or descending."""
    if not all(part.isdecimal() and len(part) < 10 for part in (first, last)) or not 1 <= int(first) <= int(last):
        return None
    return int(first), int(last)


def parsed_settings(settings: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the settings of a call in Python, such as ``{"exact": True}``, as ``--set`` gives them."""
    from paceline import config

    words = []
    for key, value in config.flattened(settings or {}).items():
        words.append(f"{key}={'none' if value is None else value if isinstance(value, str) else json.dumps(value)}")
    return config.parse_command_line(words)


def misplaced(request: Request) -> str:
    """Return a hint if the number of workers follows the script, so that the script receives it, otherwise ""."""
    index = next((index for index, word in enumerate(request.arguments) if word in ("-n", "-np", "--workers")), None)
    if index is None or request.workers != 1:
        return ""
    words = shlex.join(request.arguments[index : index + 2])
    return (
        f"note: {words} comes after {request.script.name}, so the script gets it, and one worker starts. For more: "
        f"paceline run -n 2 {request.script.name}"
    )


def not_resumed(request: Request) -> str:
    """Return a note if the run to resume does not exist, so that a new one starts, but another run could be resumed."""
    from paceline.launchers.runs import newest_resumable

    if request.resume != "auto" or request.name is None:
        return ""
    runs, other = request.runs.absolute(), None
    try:
        if not (runs / request.name).exists():
            other = newest_resumable(runs, request.script, any_name=True)
    except OSError:  # an impossible name, or a directory that cannot be read
        pass
    if other is None:
        return ""
    return (
        f"note: there is no run {request.name!r} in {request.runs}, so a new one starts. The newest run of "
        f"{request.script.name} that can be resumed is {other.name!r}."
    )
