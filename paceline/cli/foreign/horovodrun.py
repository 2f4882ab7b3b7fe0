"""``paceline horovodrun``: translate the options of ``horovodrun`` to those of ``paceline run --horovod``.

:func:`translate` alone decides how each option is translated.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from paceline.cli.foreign import run_module
from paceline.cli.report import say
from paceline.environments import env
from paceline.errors import ConfigError
from paceline.horovod.runner.hosts import INSTEAD, fill, worker_variables

CONTEXT: dict[str, object] = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "token_normalize_func": None,
}
MORE_HELP = " Takes the options of Horovod's horovodrun, then the command; `--verbose` shows what is run."

_VARIABLES = {
    "timeline-filename": "HOROVOD_TIMELINE",
    "cycle-time-ms": "HOROVOD_CYCLE_TIME",
    "cache-capacity": "HOROVOD_CACHE_CAPACITY",
    "stall-check-warning-time-seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "stall-check-shutdown-time-seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "start-timeout": "HOROVOD_GLOO_TIMEOUT_SECONDS",
    "gloo-timeout-seconds": "HOROVOD_GLOO_TIMEOUT_SECONDS",
    "log-level": "HOROVOD_LOG_LEVEL",
}
_FLAG_VARIABLES = {
    "timeline-mark-cycles": "HOROVOD_TIMELINE_MARK_CYCLES",
    "no-stall-check": "HOROVOD_STALL_CHECK_DISABLE",
}
_INSTEAD = {
    **INSTEAD,
    "check-build": "see `paceline doctor`",
    "config-file": "give the options themselves",
    "jsrun": INSTEAD["mpi"],
    "autotune": "set --fusion-threshold-mb and --cycle-time-ms",
}
_LONG_OF_SHORT = {"cb": "check-build", "p": "ssh-port", "i": "ssh-identity-file"}


class Translated(NamedTuple):
    """Translated command line."""

    words: tuple[str, ...]  # arguments of ``paceline``, from ``run`` on
    environment: dict[str, str]
    verbose: bool


def command(
    words: Annotated[
        list[str] | None, typer.Argument(help="Options of horovodrun, and the command.", metavar="COMMAND")
    ] = None,
) -> None:
    """Run a script written for Horovod, with the options of horovodrun."""
    from paceline.cli.main import main

    found = translate(words or [])
    for name, value in found.environment.items():
        env.put(name, value)
    if found.verbose:
        shown = [f"{name}={shlex.quote(value)}" for name, value in found.environment.items()]
        say(" ".join([*shown, "paceline", shlex.join(found.words)]))
    main(list(found.words))


def translate(words: Sequence[str]) -> Translated:
    """Translate a command line of ``horovodrun`` to one of ``paceline run``. Reads host files and starts nothing.

    Example:
        >>> translate(["-np", "2", "python", "train.py", "--lr", "1"]).words
        ('run', '--horovod', '-n', '2', 'train.py', '--lr', '1')
    """
    given, rest = _parser().parse_known_args(list(words))
    if not given.command:
        raise ConfigError("horovodrun: name the command, as in `paceline horovodrun -np 4 python train.py`.")
    if rest:
        _refuse(rest[0])
    out, environment = ["run", "--horovod"], _variables(given)
    workers, hosts = fill(given.hosts, given.hostfile, given.slots, given.np)
    least, most = given.min_np, given.max_np
    if given.host_discovery_script is not None:
        if given.slots != 1:
            raise ConfigError("--slots with --host-discovery-script: let the script print host:slots.")
        workers, least = workers or least, least or workers
        if workers is None:
            raise ConfigError("--host-discovery-script: give -np or --min-np, the workers to start with.")
        most = most or 512
    if workers is None:
        raise ConfigError("horovodrun: give the number of workers, as in -np 4.")
    out += ["-n", str(workers)] if hosts is None else ["--hosts", hosts]
    if least is not None or most is not None:
        out += ["--elastic", f"{least or workers}:{most or workers}"]
    if given.host_discovery_script is not None:
        out += ["--host-discovery-script", given.host_discovery_script]
    if given.elastic_timeout is not None:
        out += ["--patience", given.elastic_timeout]
    return Translated((*out, *_script(given.command)), environment, given.verbose)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("paceline horovodrun", allow_abbrev=False, add_help=False)
    parser.add_argument("-np", "--num-proc", dest="np", type=int)
    parser.add_argument("-H", "--hosts")
    parser.add_argument("-hostfile", "--hostfile")
    parser.add_argument("--min-np", "--min-num-proc", dest="min_np", type=int)
    parser.add_argument("--max-np", "--max-num-proc", dest="max_np", type=int)
    parser.add_argument("--slots", "--slots-per-host", dest="slots", type=int, default=1)
    parser.add_argument("--host-discovery-script")
    parser.add_argument("--elastic-timeout")
    parser.add_argument("--network-interface", "--network-interfaces", dest="network")
    parser.add_argument("--fusion-threshold-mb", type=float)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--gloo", action="store_true")
    for name in _VARIABLES:
        parser.add_argument(f"--{name}")
    for name in _FLAG_VARIABLES:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


def _refuse(word: str) -> None:
    from paceline.config import quoted

    name = word.partition("=")[0].lstrip("-")
    name = _LONG_OF_SHORT.get(name, name)
    instead = _INSTEAD.get(name, "`paceline run --help` and docs/horovod.md list the options")
    raise ConfigError(f"horovodrun {quoted(word)} has no counterpart here: {instead}.")


def _variables(given: argparse.Namespace) -> dict[str, str]:
    said = vars(given)
    values = {name: said[name.replace("-", "_")] for name in _VARIABLES}
    found = {_VARIABLES[name]: value for name, value in values.items() if value is not None}
    found |= {variable: "1" for name, variable in _FLAG_VARIABLES.items() if said[name.replace("-", "_")]}
    if given.fusion_threshold_mb is not None:
        found["HOROVOD_FUSION_THRESHOLD"] = str(int(given.fusion_threshold_mb * 2**20))
    return found | worker_variables(None, given.network)


def _script(words: Sequence[str]) -> list[str]:
    """Return the script and arguments of ``python train.py ...``, ``python -m module ...`` or ``pytest ...``."""
    from paceline.config import quoted

    rest = list(words)
    if Path(rest[0]).name.startswith("python"):
        rest = rest[1:]
        while rest and rest[0] == "-u":
            rest = rest[1:]
        if rest[:1] == ["-m"] and len(rest) > 1:
            return [run_module.__file__, *rest[1:]]
    elif (found := shutil.which(rest[0])) is not None and _is_python(Path(found)):
        return [found, *rest[1:]]
    if not rest or rest[0].startswith("-") or not rest[0].endswith(".py"):
        raise ConfigError(
            f"horovodrun {quoted(shlex.join(words))}: workers run Python; give a script as in `python train.py`, a "
            f"module as in `python -m pytest`, or a program that is a script of Python."
        )
    return rest


def _is_python(program: Path) -> bool:
    with program.open("rb") as file:
        first = file.readline(4096)
    return first.startswith(b"#!") and b"python" in first
