"""Cluster interface. A cluster (an engine or a list of hosts) provides machines; an agent on each starts the workers.

::

    Request ── decide ──> Placement ── carry_out ──> exit code
    and Options           which command runs on which machine, and what --dry-run prints

An agent is ``paceline run --on local`` with ``--nodes`` and ``--rendezvous``. The first machine runs the coordinator
and the others join it. Lost workers are replaced, and machines may leave and join. A cluster only starts agents and
returns their exit code. For ``paceline doctor`` the agents are doctors, which use the same rendezvous.
"""

from __future__ import annotations

import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from paceline.config import quoted
from paceline.environments import env
from paceline.errors import ConfigError
from paceline.launchers.base import Examination, Request

MEETING = "HOST:PORT"  # placeholder for the rendezvous in a placement, which is known once the cluster is connected


@dataclass(frozen=True)
class Options:
    """Options for clusters. None means not set. Each cluster reads some of them."""

    hosts: str | None = None  # host1:4,host2:2
    hostfile: Path | None = None
    time: str | None = None  # time limit in Slurm's format
    partition: str | None = None
    account: str | None = None
    gpus: int | None = None  # number of GPUs per machine
    image: str | None = None
    namespace: str | None = None
    kind: str | None = None  # kind of the Kubernetes object
    volume: str | None = None  # PersistentVolumeClaim for the run directories (Kubernetes)
    address: str | None = None  # address of a Ray cluster
    master: str | None = None  # master URL of a Spark cluster
    session: Any = field(default=None, repr=False)  # SparkSession, from Python only
    slot_cpus: int | None = None  # CPUs per Ray agent, several of which may share a node; from Python only
    detach: bool = False  # submit without waiting for the end

    def given(self) -> list[str]:
        return [one.name for one in fields(self) if getattr(self, one.name) not in (None, False)]

    def words(self) -> list[str]:
        """Return the options as command-line arguments, without options that exist in Python only."""
        return [
            word
            for name in self.given()
            if name not in ("session", "slot_cpus")
            for word in (f"--{name}", *([] if name == "detach" else [str(getattr(self, name))]))
        ]


@dataclass(frozen=True)
class Agent:
    """Command that starts the workers of one machine."""

    machine: str  # name of the machine, as the engine or the user calls it
    command: tuple[str, ...]  # command line of the agent
    # variables added to the machine's environment, such as the secret of the run
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    def meeting_at(self, rendezvous: str) -> Agent:
        """Return the agent with ``host:port`` of the first machine replaced."""
        index = self.command.index("--rendezvous") + 1
        return replace(self, command=(*self.command[:index], rendezvous, *self.command[index + 1 :]))


@dataclass(frozen=True)
class Placement:
    """Launch plan for a cluster."""

    place: str  # name of the cluster, or the master's URL for Spark
    agents: tuple[Agent, ...]  # one agent per machine. The agent with the coordinator is first.
    text: str  # readable form of what is submitted or executed, for ``--dry-run``. Contains no secret.


class Place(ABC):
    """Base class of clusters. Each cluster is a module of this package and an entry in ``registry.py``."""

    reads: ClassVar[frozenset[str]] = frozenset()  # names of the options that this cluster reads
    examines: ClassVar[bool] = True  # whether this cluster supports ``paceline doctor``

    @classmethod
    def found(cls, environment: Mapping[str, str]) -> str | None:
        """Return how this cluster was recognized, as text for the user, or None if this process does not run in it."""
        return None

    @abstractmethod
    def decide(self, request: Request, options: Options, environment: Mapping[str, str]) -> Placement:
        """Return the launch plan without starting or writing anything.

        Raises:
            ConfigError: the options cannot be used.
            StartError: the cluster cannot be reached, or its engine is not installed.
        """

    @abstractmethod
    def carry_out(self, placement: Placement, request: Request) -> int:
        """Start the agents, show the first agent's output, wait until they end. Return the exit code of the run.

        SIGINT and SIGTERM stop the run after a checkpoint, as in ``paceline run`` on one machine.

        Raises:
            StartError: an agent could not be started.
        """


def check_options(name: str, place: type[Place], options: Options) -> None:
    """Raise ConfigError if options of other clusters are set."""
    for option in options.given():
        if option not in place.reads:
            raise ConfigError(f"--{option} has no effect with --on {name}; leave it out.")


def given_options(request: Request) -> list[str]:
    """Return the options of ``paceline run`` that produce this request, except for default values."""
    fixed = request.least == request.most == request.workers and request.standby and request.nodes is None
    first, last = request.nodes or (0, 0)
    words = ["-n", str(request.workers)]
    for option, value, usual in (
        ("--name", request.name, None),
        ("--resume", request.resume, None),
        ("--runs-dir", request.runs, Path("runs")),
        ("--plan", request.plan, None),
        ("--port", request.port, None),
        ("--elastic", None if request.least is None or fixed else f"{request.least}:{request.most}", None),
        ("--standby", request.standby, 0),
        ("--host-discovery-script", request.discovery, None),
        ("--nodes", f"{first}:{last}" if first < last else str(last), "0"),
        ("--rendezvous", request.rendezvous, None),
        ("--secret-file", request.secret_file, None),
        ("--patience", request.patience_seconds, Request.patience_seconds),
        ("--grace", request.grace_seconds, Request.grace_seconds),
        ("--notify", request.notify, None),
    ):
        if value != usual:
            words += [option, f"{value:g}" if isinstance(value, float) else str(value)]
    for key, setting in request.settings.items():
        if key != "resume":
            words += ["--set", f"{key}={setting}"]
    for condition in request.alerts:
        words += ["--alert", condition]
    words += [] if request.preload else ["--no-preload"]
    return [*words, "--horovod"] if request.horovod else words


def agent_command(
    request: Request, workers: int, total: int, nodes: tuple[int, int], rendezvous: str, python: str = sys.executable
) -> list[str]:
    """Return the command line of an agent.

    Args:
        nodes: minimum and maximum number of machines.
        rendezvous: ``host:port`` of the first machine.
        python: interpreter on the machine. Defaults to the path of this interpreter.
    """
    if request.examination is not None:
        return _doctor_command(request, request.examination, workers, nodes[1], rendezvous, python)
    own = replace(request, workers=workers, least=request.least or total, most=request.most or total, nodes=nodes)
    words = given_options(replace(own, rendezvous=rendezvous, port=None, discovery=None))
    return [python, "-m", "paceline", "run", "--on", "local", *words, str(request.script), *request.arguments]


def _doctor_command(
    request: Request, wanted: Examination, workers: int, machines: int, rendezvous: str, python: str
) -> list[str]:
    """Return the command line of an agent that runs the doctor on its machine."""
    words = [python, "-m", "paceline", "doctor", "--on", "local", "--workers", str(workers)]
    words += ["--nodes", str(machines), "--rendezvous", rendezvous]
    words += ["--patience", f"{request.patience_seconds:g}", "--runs-dir", str(request.runs)]
    for option, value in (
        ("--secret-file", request.secret_file),
        ("--data", wanted.data),
        ("--checkpoints", wanted.checkpoints),
    ):
        words += [] if value is None else [option, str(value)]
    words += ["--verbose"] if wanted.verbose else []
    words += ["--json"] if wanted.as_json else []
    return [*words, *([] if wanted.script is None else [str(wanted.script)])]


def coordinated_here(request: Request, variables: Mapping[str, str], python: str = sys.executable) -> list[Agent]:
    """Return this machine's agent, with the coordinator and no workers, and then an agent for each machine to start.

    Any machine but this one may be lost, so the run is elastic. Paths are absolute, and the rendezvous is ``MEETING``.

    Args:
        variables: additional variables of the other machines.
        python: interpreter on the other machines.
    """
    fewest, most = request.nodes or (1, 1)
    request = replace(request.absolute(), least=request.smallest, most=request.largest)
    machines = (fewest, most) if request.examination is None else (fewest + 1, most + 1)  # plus this machine
    here = agent_command(replace(request, standby=0), 0, 0, machines, MEETING)
    there = tuple(agent_command(request, request.workers, 0, machines, MEETING, python))
    known = secret_environment(request)
    others = [Agent(f"machine {number}", there, {**variables, **known}) for number in range(most)]
    return [Agent("here", tuple(here), known), *others]


def secret_environment(request: Request) -> dict[str, str]:
    """Return the variable with the agents' shared secret, the user's or a new one. Empty if the secret is in a file."""
    return {} if request.secret_file is not None else {env.SECRET: env.text(env.SECRET) or secrets.token_hex(32)}


def parse_hosts(text: str, slots: int) -> list[tuple[str, int]]:
    """Parse ``-H host1:4,host2:2``. Return hosts with their numbers of workers."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, colon, count = part.strip().partition(":")
        if not name or name.startswith("-") or (colon and not (count.isdecimal() and 0 < int(count) < 10_000)):
            raise ConfigError(f"-H {quoted(text)}: give hosts and their numbers of workers, as in -H host1:4,host2:2.")
        if name in found:
            raise ConfigError(f"-H {quoted(text)}: {name} is there twice; give the sum of its workers once.")
        found[name] = int(count) if colon else slots
    return list(found.items())


def listed_hosts(options: Options, slots: int) -> list[tuple[str, int]] | None:
    """Return the hosts of ``-H`` or ``--hostfile`` with their numbers of workers. None if neither is given."""
    if options.hosts is not None and options.hostfile is not None:
        raise ConfigError("-H and --hostfile both name the hosts; give one of them.")
    if options.hosts is not None:
        return parse_hosts(options.hosts, slots)
    return None if options.hostfile is None else read_hostfile(options.hostfile, slots)


def read_hostfile(path: Path, slots: int) -> list[tuple[str, int]]:
    """Read a host file with lines ``host slots=4`` (Open MPI, Horovod), ``host:4`` (MPICH, Intel), or ``host``."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    found: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        name, *words = line.partition("#")[0].split() or [""]
        if not name:
            continue
        host, colon, count = name.partition(":")
        if not host or host.startswith("-"):
            raise ConfigError(f"{path}, line {number}: {quoted(line)} does not begin with the name of a host.")
        given = [word.partition("=")[2] for word in words if word.startswith("slots=")]
        count = count if colon else given[0] if given else str(slots)
        if not (count.isdecimal() and 0 < int(count) < 10_000):
            raise ConfigError(f"{path}, line {number}: {quoted(line)} has no number of slots such as slots=4.")
        found[host] = found.get(host, 0) + int(count)
    if not found:
        raise ConfigError(f"--hostfile {path} names no host.")
    return list(found.items())
