"""SSH cluster: an agent on each host, started through OpenSSH, which ends with its connection.

::

    launcher ─┬─ ssh ─ h1: leash ─ agent, with the coordinator ─ workers
              └─ ssh ─ h2: leash ─ agent ─────────────────────── workers

With a discovery script the first agent runs on this machine, so that any other host may join and leave. Hosts and slots
that the script adds later get their own agents.

The secret of the run is sent through the standard input of ssh, because all users of a machine can read its command
lines. The leash (``remote.py``) ends the agent when the connection ends.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paceline.environments import env
from paceline.errors import ConfigError, StartError, WorkerLost
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
from paceline.launchers.clusters.clients import Client, More, follow
from paceline.launchers.clusters.discovery import Discovery, Slots, ask, is_here, slots_here
from paceline.launchers.clusters.ssh import remote as ssh_remote
from paceline.launchers.clusters.ssh.check import CONNECTION_FAILED, Needs, check_hosts, first_input

_OPTIONS = {
    "BatchMode": "yes",  # a prompt would wait forever
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "4",
    "LogLevel": "ERROR",
}
"""Options in addition to the user's configuration, which decides how host keys are checked."""
_PASSED_ON = ("PACELINE_", "HOROVOD_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_")
_PASSED_ON_WHOLE = ("PYTHONPATH", "PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG")
_HERE = "localhost"
_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 5.0, 60.0
_LEFT = 75
_KILLED = 128
_REFUSED = (2, 3, 126, 127)
"""Exit codes of an agent that could not start. Without it the other agents would wait for --patience."""


class Ssh(Place):
    """Hosts of ``-H``, ``--hostfile`` or a discovery script."""

    reads = frozenset({"hosts", "hostfile"})

    def decide(self, request: Request, options: Options, environment: Mapping[str, str]) -> Placement:
        hosts = _hosts(request, options)
        total = sum(count for _, count in hosts)
        nodes = (len(hosts), len(hosts)) if request.discovery is None else (1, request.most or 1)
        meeting = f"{hosts[0][0]}:PORT"  # address and port are known after the check of the hosts
        given = {**_passed_on(environment), **secret_environment(request)}
        agents = tuple(
            Agent(name, tuple(agent_command(request, count, total, nodes, meeting)), given) for name, count in hosts
        )
        return Placement("ssh", agents, "\n".join(map(_shown, agents)))

    def carry_out(self, placement: Placement, request: Request) -> int:
        agents = placement.agents
        files = tuple(map(str, request.files))
        known = {name: text for name, text in agents[0].environment.items() if name != env.SECRET}
        needs = Needs(sys.executable, os.getcwd(), files, known)
        must_meet, grows = request.examination is None, request.discovery is not None  # a doctor reports failures
        address, port = check_hosts({one.machine: _reach(one.machine) for one in agents}, needs, must_meet, grows)

        def client(agent: Agent) -> Client:
            return _client(agent, f"{address}:{port}", request.grace_seconds)

        clients = [client(one) for one in agents]
        growth = None if request.discovery is None else _Growth(request.discovery, request, agents, needs, client)
        ends = _Ends(clients[0], request.examination is not None, growth)
        more: More = tuple if growth is None else growth.take
        try:
            code = follow(clients, request.grace_seconds, ends.ended, ends.again, more)
        finally:
            if growth is not None:
                growth.over.set()
        if ends.refused:
            return ends.refused
        if code == CONNECTION_FAILED:
            raise WorkerLost(
                f"The connection to {agents[0].machine}, the first host, is lost, and the coordinator with it: the run "
                f"is over. With --resume auto and the same --name it continues from its newest checkpoint."
            )
        return code


class _Ends:
    """Policy for ended agents: restart the agent, continue without it, or end the run.

    Args:
        first: client of the agent with the coordinator.
        examines: whether the agents are doctors, each of which reports.
        growth: source of additional agents, if there is a discovery script.
    """

    def __init__(self, first: Client, examines: bool, growth: _Growth | None) -> None:
        self._first, self._examines, self._growth = first, examines, growth
        self._delays: dict[str, float] = {}
        self.refused = 0  # exit code of an agent that could not start and ended the run, or 0

    def again(self, client: Client, code: int) -> float | None:
        if code not in (CONNECTION_FAILED, _LEFT) and 0 <= code < _KILLED:
            return None
        why = "is lost" if code != _LEFT else "has left"
        if self._growth is not None and not self._growth.keeps(client.name):
            sys.stderr.write(f"host {client.name} {why}\n")
            return None
        delay = self._delays.get(client.name, _FIRST_DELAY_SECONDS)
        self._delays[client.name] = min(2 * delay, _LONGEST_DELAY_SECONDS)
        sys.stderr.write(f"host {client.name} {why}; its agent is started again in {delay:.0f} s\n")
        return delay

    def ended(self, client: Client, code: int) -> bool:
        if client is self._first:
            return self._examines  # other doctors may still report why they did not join
        if code not in _REFUSED or self._examines:
            return True
        sys.stderr.write(f"the agent of {client.name} has ended with exit code {code}; see its lines above\n")
        if client.name in self._delays or self._growth is not None:  # the other agents are training
            return True
        self.refused = code
        return False


class _Growth:
    """Source of agents for the slots that a discovery script adds after the start.

    Args:
        agents: initial agents. The first agent runs on this machine.
        client: builds the client of an agent.
    """

    def __init__(
        self, script: Path, request: Request, agents: Sequence[Agent], needs: Needs, client: Callable[[Agent], Client]
    ) -> None:
        self._request, self._needs, self._client, self._model = request, needs, client, agents[0]
        self._lock = threading.Lock()
        self._have = {one.machine: int(_option(one.command, "-n")) for one in agents}
        self._new: list[Client] = []
        self._told: set[str] = set()
        self.over = threading.Event()
        self._discovery = Discovery(script, self.over.is_set, self._poll)

    def take(self) -> list[Client]:
        """Return the clients to start that were added since the last call."""
        with self._lock:
            new, self._new = self._new, []
        return new

    def keeps(self, host: str) -> bool:
        """Return whether the script still names a lost host. Forget the host otherwise."""
        if host in _by_host(self._discovery.hosts):
            return True
        with self._lock:
            self._have.pop(host, None)
        return False

    def _poll(self, hosts: Slots) -> None:
        for host, slots in _by_host(hosts).items():
            with self._lock:
                room = (self._request.most or 0) - sum(self._have.values())
                count = min(room, slots - self._have.get(host, 0))
            if count > 0 and self._is_fit(host):
                nodes, meeting = (1, self._request.most or 1), _option(self._model.command, "--rendezvous")
                command = tuple(agent_command(self._request, count, count, nodes, meeting))
                with self._lock:
                    self._have[host] = self._have.get(host, 0) + count
                    self._new.append(self._client(Agent(host, command, self._model.environment)))

    def _is_fit(self, host: str) -> bool:
        """Return whether a host participates already or passes the check. Print each failure once."""
        if self._have.get(host):
            return True
        try:
            check_hosts({one: _reach(one) for one in dict.fromkeys((_HERE, host))}, self._needs, more_come=True)
        except StartError as error:
            if str(error) not in self._told:
                self._told.add(str(error))
                sys.stderr.write(f"{error}\n")
            return False
        return True


def _hosts(request: Request, options: Options) -> list[tuple[str, int]]:
    if request.discovery is not None:
        return _first_hosts(ask(request.discovery), request.most or 0)
    found = listed_hosts(options, request.workers)
    if found is None:
        raise ConfigError("--on ssh: give the hosts by -H host1:4,host2:2 or by --hostfile FILE.")
    if request.nodes is not None:
        raise ConfigError(
            "--nodes has no effect with --on ssh, which uses all hosts: leave it out, and give the smallest number of "
            "workers with --elastic."
        )
    return found


def _first_hosts(found: Slots, most: int) -> list[tuple[str, int]]:
    """Return this machine (perhaps without workers) and the script's other hosts, with at most `most` workers."""
    taken = {_HERE: 0}
    for host, slots in _by_host(found).items():
        count = min(slots, most - sum(taken.values()))
        if count or host == _HERE:
            taken[host] = count
    return list(taken.items())


def _by_host(found: Slots) -> Slots:
    """Return the slots by host, with all names of this machine merged into ``localhost``."""
    here = {_HERE: slots_here(found)} if any(map(is_here, found)) else {}
    return {**here, **{host: slots for host, slots in found.items() if not is_here(host)}}


def _option(command: Sequence[str], name: str) -> str:
    return command[command.index(name) + 1]


def _passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to pass on to agents, without the loopback interface set by a parent launcher."""
    return {
        name: text
        for name, text in environment.items()
        if (name.startswith(_PASSED_ON) or name in _PASSED_ON_WHOLE)
        and not (name.endswith("_SOCKET_IFNAME") and text == "lo")
    }


def _reach(host: str) -> list[str]:
    """Return the command that runs Python on a host. The program reads its orders from standard input."""
    python = [sys.executable, "-I", "-c", ssh_remote.BOOT]
    return python if is_here(host) else [*_ssh(host), f"exec {shlex.join(python)}"]


def _ssh(host: str) -> list[str]:
    return ["ssh", "-T", *(word for name, text in _OPTIONS.items() for word in ("-o", f"{name}={text}")), "--", host]


def _client(agent: Agent, meeting: str, grace_seconds: float) -> Client:
    """Return the client that starts an agent and holds its leash."""
    order = {
        "command": agent.meeting_at(meeting).command,
        "environment": dict(agent.environment),
        "directory": os.getcwd(),
        "grace": grace_seconds,
    }
    return Client(agent.machine, _reach(agent.machine), first_input=first_input(order))


def _shown(agent: Agent) -> str:
    command = f"cd {shlex.quote(os.getcwd())} && {shlex.join(agent.command)}"
    return command if is_here(agent.machine) else shlex.join([*_ssh(agent.machine), command])
