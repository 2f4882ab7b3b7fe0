"""Hosts that are reached by OpenSSH: an agent on each, which ends with its connection.

::

    launcher ─┬─ ssh ─ h1: leash ─ agent, with the coordinator ─ workers
              └─ ssh ─ h2: leash ─ agent ─────────────────────── workers

The secret of the run goes there through the standard input of ssh: command lines are no place for it, as everybody on a
machine can read them. What holds the agent there (``ssh_remote.py``) ends it when the connection ends.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence

from paceline import env
from paceline.errors import ConfigError, WorkerLost
from paceline.launchers.base import Request
from paceline.launchers.places import ssh_remote
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
from paceline.launchers.places.ssh_check import CONNECTION_FAILED, Needs, check_hosts, first_input

_OPTIONS = {
    "BatchMode": "yes",  # a question would wait for ever
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "4",
    "LogLevel": "ERROR",
}
"""Besides the user's own configuration; host keys are checked as that says."""
_PASSED_ON = ("PACELINE_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_")
_PASSED_ON_WHOLE = ("PYTHONPATH", "PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG")
_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 5.0, 60.0
_LEFT = 75
_KILLED = 128
_REFUSED = (2, 3, 126, 127)
"""Exit codes of an agent that could not begin; without it the others would wait for --patience."""


class Ssh(Place):
    """Hosts of ``-H`` or ``--hostfile``."""

    reads = frozenset({"hosts", "hostfile"})

    def decide(self, request: Request, options: Options, environment: Mapping[str, str]) -> Placement:
        hosts = _hosts(request, options)
        total = sum(count for _, count in hosts)
        meeting = f"{hosts[0][0]}:PORT"  # both are known when the hosts have been asked
        given = {**_passed_on(environment), **secret_environment(request)}
        agents = tuple(
            Agent(name, tuple(agent_command(request, count, total, (len(hosts), len(hosts)), meeting)), given)
            for name, count in hosts
        )
        return Placement("ssh", agents, "\n".join(map(_shown, agents)))

    def carry_out(self, placement: Placement, request: Request) -> int:
        agents = placement.agents
        files = tuple(map(str, request.files))
        known = {name: text for name, text in agents[0].environment.items() if name != env.SECRET}
        needs = Needs(sys.executable, os.getcwd(), files, known)
        must_meet = request.examination is None  # a doctor says more than that
        address, port = check_hosts({one.machine: _reach(one.machine) for one in agents}, needs, must_meet)
        clients = [_client(one, f"{address}:{port}", request.grace_seconds) for one in agents]
        delays: dict[str, float] = {}

        def again(client: Client, code: int) -> float | None:
            if code not in (CONNECTION_FAILED, _LEFT) and 0 <= code < _KILLED:
                return None
            delay = delays.get(client.name, _FIRST_DELAY_SECONDS)
            delays[client.name] = min(2 * delay, _LONGEST_DELAY_SECONDS)
            why = "is lost" if code != _LEFT else "has left"
            sys.stderr.write(f"host {client.name} {why}; its agent is started again in {delay:.0f} s\n")
            return delay

        first = agents[0].machine

        refused: list[int] = []

        def ended(client: Client, code: int) -> bool:
            if client.name == first:
                return request.examination is not None  # others may yet say why they did not come
            if code not in _REFUSED or request.examination is not None:
                return True
            sys.stderr.write(f"the agent of {client.name} has ended with exit code {code}; see its lines above\n")
            if client.name in delays:  # the others train
                return True
            refused.append(code)
            return False

        code = follow(clients, env.inherited(), request.grace_seconds, ended, again)
        if refused:
            return refused[0]
        if code == CONNECTION_FAILED:
            raise WorkerLost(
                f"The connection to {first}, the first host, is lost, and the coordinator with it: the run is over. "
                f"With --resume auto and the same --name it goes on from its newest checkpoint."
            )
        return code


def _hosts(request: Request, options: Options) -> list[tuple[str, int]]:
    if (options.hosts is None) == (options.hostfile is None):
        raise ConfigError("--on ssh: give the hosts by -H host1:4,host2:2 or by --hostfile FILE, one of the two.")
    if request.nodes is not None:
        raise ConfigError(
            "--nodes has no effect with --on ssh, which uses all hosts: leave it out, and say with --elastic how few "
            "workers may train."
        )
    if options.hosts is not None:
        return parse_hosts(options.hosts, request.workers)
    assert options.hostfile is not None
    return read_hostfile(options.hostfile, request.workers)


def _passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that agents get from here."""
    return {name: text for name, text in environment.items() if name.startswith(_PASSED_ON) or name in _PASSED_ON_WHOLE}


def _is_here(host: str) -> bool:
    return env.is_loopback(host) or host == socket.gethostname()


def _reach(host: str) -> list[str]:
    """The command that runs Python on a host; it reads there what to do."""
    python = [sys.executable, "-I", "-c", ssh_remote.BOOT]
    if _is_here(host):
        return python
    return [*_ssh(host), f"exec {shlex.join(python)}"]


def _ssh(host: str) -> list[str]:
    return ["ssh", "-T", *(word for name, text in _OPTIONS.items() for word in ("-o", f"{name}={text}")), "--", host]


def _client(agent: Agent, meeting: str, grace_seconds: float) -> Client:
    """What starts an agent, and holds it."""
    order = {
        "command": _meet(agent.command, meeting),
        "environment": dict(agent.environment),
        "directory": os.getcwd(),
        "grace": grace_seconds,
    }
    return Client(agent.machine, _reach(agent.machine), first_input=first_input(order))


def _meet(command: Sequence[str], meeting: str) -> list[str]:
    words = list(command)
    words[words.index("--rendezvous") + 1] = meeting
    return words


def _shown(agent: Agent) -> str:
    """As a person would type it."""
    command = f"cd {shlex.quote(os.getcwd())} && {shlex.join(agent.command)}"
    return command if _is_here(agent.machine) else shlex.join([*_ssh(agent.machine), command])
