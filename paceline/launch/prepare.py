"""From a request to a launch: check everything that can be checked before a process starts."""

from __future__ import annotations

import os

from paceline import config, env
from paceline.errors import ConfigError
from paceline.launch import machine, runs
from paceline.launch.base import Launch, Request
from paceline.launch.registry import launcher_named
from paceline.settings import Settings


def prepare(request: Request, interface: str | None = None) -> Launch:
    """Check the request, choose the port and the run directory, and create that directory.

    Args:
        request: what was asked for.
        interface: the network interface for workers of several machines; none: all are on this one.

    Raises:
        ConfigError: the script, a setting, the number of workers or the name cannot be used.
        StartError: the wanted port is in use.
    """
    check(request)
    settings = known_settings(request)
    here = machine.look()
    machine.choose_port(request.port)  # of the coordinator
    inherited = env.inherited()
    if interface is not None:
        inherited = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface, **inherited}
    launcher = launcher_named(request.launcher)
    launch = launcher.decide(request, settings, here, inherited, runs.choose(request), machine.choose_port(None))
    runs.make(launch, request, here)
    return launch


def check(request: Request) -> None:
    """Refuse a request that could not start."""
    script = request.script
    if str(script).startswith("-"):
        raise ConfigError(f"There is no option {script}; options of paceline go before the script.")
    if not script.exists():
        raise ConfigError(f"There is no script {script} (looked in {script.absolute().parent}).")
    if script.is_dir():
        raise ConfigError(f"{script} is a directory; name the script inside it.")
    if not os.access(script, os.R_OK):
        raise ConfigError(f"The script {script} cannot be read; check its permissions.")
    if request.workers < 1:
        raise ConfigError(f"--workers {request.workers}: at least one worker must train.")


def known_settings(request: Request) -> Settings:
    """The settings as far as they are known before the script runs: without its own arguments.

    Raises:
        ConfigError: one of them cannot be used, or there is no such strategy.
    """
    plan = request.plan or env.plan_file()
    layers = (
        config.read_plan(plan) if plan else {},
        config.environment_settings(),
        request.settings,
    )
    settings = config.resolve({}, *layers).settings
    config.check_strategy(settings.strategy)
    return settings
