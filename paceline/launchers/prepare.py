"""Preparation of a launch: check everything that can be checked before a process starts."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from paceline import config
from paceline.config import quoted
from paceline.environments import env
from paceline.environments.start import MOST_WORKERS
from paceline.errors import ConfigError
from paceline.launchers import machine, runs
from paceline.launchers.base import Launch, Request
from paceline.launchers.registry import launcher_named
from paceline.settings import Settings
from paceline.system.number_kinds import LONGEST_SECONDS

_PYTHON = re.compile(r"python[\d.]*")
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "horovodrun", "mpiexec", "mpirun", "srun", "paceline")
"""Names of the interpreter, which other launchers want before the script."""
_MOST_HERE = 512
"""Maximum number of workers per machine. Each machine has a range of numbers for its replacement workers."""


@contextlib.contextmanager
def prepare(request: Request, interface: str | None = "lo") -> Iterator[Launch]:
    """Check the request, choose port and run directory, and lock the directory until the ``with`` block ends.

    Args:
        interface: network interface between the workers. Defaults to loopback. None: gloo and NCCL choose.

    Raises:
        ConfigError: the script, a setting, the number of workers or the name cannot be used, or the run is in use.
        StartError: the wanted port is in use, or the system's limits are too low for this many workers.
    """
    check(request)
    settings = known_settings(request)
    machine.check_allowed(request.workers + request.standby, request.largest)
    here = machine.measure()
    machine.choose_port(request.port)  # port of the coordinator
    inherited = env.inherited()
    if interface is not None:
        inherited = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface, **inherited}
    launcher = launcher_named(request.launcher)
    with runs.claim(request) as run:
        launch = launcher.decide(request, settings, here, inherited, run, machine.choose_port(None))
        runs.make(launch, request, here)
        yield launch


def check(request: Request) -> None:
    """Raise ConfigError if the request cannot start."""
    _check_script(request.script, request.arguments)
    here, least, most = request.workers + request.standby, request.least or 1, request.most or 1
    if request.workers < 1 and (request.workers < 0 or request.rendezvous is None or request.least is None):
        raise ConfigError(
            f"--workers {quoted(request.workers)}: at least one worker must train. With 0 this machine only holds the "
            f"coordinator of others: give --nodes, --rendezvous and --elastic MIN:MAX."
        )
    if here > _MOST_HERE or max(least, most) > MOST_WORKERS:
        wanted = f"--workers {quoted(request.workers)}" if here > _MOST_HERE else f"--elastic {least}:{quoted(most)}"
        raise ConfigError(
            f"{wanted}: a machine starts at most {_MOST_HERE} workers, with those that stand by, and a run has at most "
            f"{MOST_WORKERS}. For more workers take more machines, with --nodes and --rendezvous."
        )
    if request.port is not None and not 1 <= request.port <= 65535:
        raise ConfigError(f"--port {quoted(request.port)}: a port is a number from 1 to 65535.")
    for option, seconds in (("patience", request.patience_seconds), ("grace", request.grace_seconds)):
        if not 0 <= seconds <= LONGEST_SECONDS:
            raise ConfigError(f"--{option} {seconds}: give a number of seconds from 0 to {LONGEST_SECONDS}.")


def _check_script(script: Path, arguments: tuple[str, ...]) -> None:
    if str(script).startswith("-"):
        raise ConfigError(f"There is no option {quoted(str(script))}; options of paceline go before the script.")
    own = shlex.join([*itertools.dropwhile(lambda word: not word.endswith(".py"), arguments)] or ["train.py"])
    if _PYTHON.fullmatch(script.name):
        raise ConfigError(
            f"{script} is in the place of the script. Paceline starts Python itself: leave {script} and its options "
            f"out, as in paceline run -n 2 {own}."
        )
    try:
        is_there, is_file = script.exists(), script.is_file()
    except (OSError, ValueError) as error:  # a name with thousands of characters, or with a null character
        raise ConfigError(f"The script {quoted(str(script))} cannot be looked for: {error}.") from None
    if not is_there:
        if str(script) in _LAUNCHERS:
            raise ConfigError(
                f"{script} is in the place of the script, but it starts workers, as paceline run does. Leave {script} "
                f"and its options out, as in paceline run -n 2 {own}, or write {script} without paceline run."
            )
        raise ConfigError(f"There is no script {script} (looked in {script.absolute().parent}).")
    if script.is_dir():
        raise ConfigError(f"{script} is a directory; name the script inside it.")
    if not is_file:  # workers would wait for input from a pipe
        raise ConfigError(f"{script} is not a file.")
    if not os.access(script, os.R_OK):
        raise ConfigError(f"The script {script} cannot be read; check its permissions.")


def known_settings(request: Request) -> Settings:
    """Return the settings that are known before the script runs, so without the arguments of ``paceline.start``.

    Raises:
        ConfigError: a setting cannot be used, or the strategy does not exist.
    """
    plan = request.plan or env.plan_file()
    layers = (config.read_plan(plan) if plan else {}, config.environment_settings(), request.settings)
    settings = config.resolve({}, *layers).settings
    config.check_strategy(settings.strategy)
    if request.nodes is not None and request.nodes[1] > 1:
        config.check_machines(settings.strategy, f"--nodes {request.nodes[1]}")
    return settings
