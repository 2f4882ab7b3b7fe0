"""Slurm cluster: start agents with srun on the nodes of an allocation, or submit a batch script that does so.

::

    login node    paceline run --on slurm ── sbatch ──> job.sh                then follows its output
    first node    job.sh ── paceline run --on slurm ─┬─ srun ── agent of the first node: the coordinator
                                                     └─ srun ── agent of the second node

Each agent has its own srun. If a node is lost, only its srun ends, and the others continue. Slurm ends an agent whose
srun was killed.

Signals in Slurm 22.05: SIGTERM makes srun kill its task. SIGUSR1 is forwarded, so it asks an agent to stop. `scancel`
and preemptions send SIGTERM to all processes of a job. An additional SIGUSR1 has no effect on a launcher.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from paceline.errors import ConfigError
from paceline.launchers import runs
from paceline.launchers.base import Request
from paceline.launchers.clusters.base import Agent, Options, Place, Placement, agent_command, secret_environment
from paceline.launchers.clusters.clients import Client, follow
from paceline.launchers.clusters.slurm.job import batch_script, fields_of, follow_job, require, scontrol, submit

_NOT_A_TASK = ("", "4294967290", "4294967291")
"""SLURM_STEP_ID in salloc's shell and in a batch script. Steps of srun are numbered from 0."""
_SRUN = ("srun", "--nodes=1", "--ntasks=1", "--overlap", "--export=ALL", "--kill-on-bad-exit=0")
_REFUSED = (2, 3, 126, 127)
"""Exit codes of an agent that could not start: missing script or Python, or the first node cannot be reached."""


@dataclass(frozen=True)
class Submission(Placement):
    """Batch script to submit. With ``detach``, the launcher exits after the submission."""

    detach: bool


class Slurm(Place):
    """Nodes of the allocation in which this process runs, or of a submitted job."""

    reads: ClassVar[frozenset[str]] = frozenset({"time", "partition", "account", "gpus", "detach"})

    @classmethod
    def found(cls, environment: Mapping[str, str]) -> str | None:
        nodes = environment.get("SLURM_JOB_NUM_NODES", "1")
        if not _in_allocation(environment) or nodes == "1":
            return None
        return f"Slurm's job {environment['SLURM_JOB_ID']} has {nodes} nodes"

    def decide(self, request: Request, options: Options, environment: Mapping[str, str]) -> Placement:
        if not _in_allocation(environment):
            if request.examination is not None:
                raise ConfigError(
                    "--on slurm: the doctor examines the nodes of an allocation; `salloc --nodes 2 paceline doctor` "
                    "gets one."
                )
            run = runs.choose(request)
            text = batch_script(request, options, run)
            require("sbatch", "scancel", "scontrol")
            submission = Agent("", ("sbatch", "--parsable", str(run / "job.sh")))
            return Submission("slurm", (submission,), text, options.detach)
        job = environment["SLURM_JOB_ID"]
        if given := options.given():
            raise ConfigError(
                f"--{given[0]} is for a job that is submitted, and this process is in job {job}. Leave it out, or "
                f"`unset SLURM_JOB_ID` to submit another job."
            )
        require("srun", "scontrol")
        nodes = scontrol("show", "hostnames", environment["SLURM_JOB_NODELIST"]).split()
        address = fields_of(scontrol("show", "node", nodes[0], "-o"))["NodeAddr"]
        agents = steps(request, nodes, f"{address}:{_port(int(job))}")
        return Placement("slurm", agents, "\n".join(shlex.join(agent.command) for agent in agents))

    def carry_out(self, placement: Placement, request: Request) -> int:
        if isinstance(placement, Submission):
            job = submit(placement, request)
            return 0 if placement.detach else follow_job(job, request.grace_seconds)
        return _run_steps(placement, request)


def _in_allocation(environment: Mapping[str, str]) -> bool:
    """Return whether this process runs in a job but is not a task of srun."""
    return "SLURM_JOB_ID" in environment and environment.get("SLURM_STEP_ID", "") in _NOT_A_TASK


def _port(job: int) -> int:
    """Return a port from job and process id (for several runs in a job). Free ports of other nodes are unknown."""
    return 10_000 + (7919 * job + os.getpid()) % 20_000


def steps(request: Request, nodes: list[str], rendezvous: str) -> tuple[Agent, ...]:
    """Return one agent with its srun command for each node. ``rendezvous``: ``host:port`` of the first node."""
    fewest, most = request.nodes or (len(nodes), len(nodes))
    if len(nodes) < fewest:
        raise ConfigError(f"--nodes {fewest}: the allocation has {len(nodes)}: {' '.join(nodes)}.")
    nodes = nodes[:most]
    here = request.workers
    bounded = replace(request, least=request.least or here * fewest, most=request.most or here * len(nodes))
    command = agent_command(bounded, here, here * len(nodes), (fewest, len(nodes)), rendezvous)
    known = secret_environment(request)
    return tuple(Agent(node, (*_SRUN, f"--nodelist={node}", *command), known) for node in nodes)


def _run_steps(placement: Placement, request: Request) -> int:
    refused: list[int] = []

    def ended(client: Client, code: int) -> bool:
        if code not in _REFUSED or client is clients[0]:
            return True
        refused.append(code)
        sys.stderr.write(f"the agent of {client.name} could not begin: exit code {code}; see its lines above\n")
        return False

    clients = [Client(one.machine, one.command, one.environment, stop=signal.SIGUSR1) for one in placement.agents]
    code = follow(clients, request.grace_seconds, ended)
    return refused[0] if refused else code
