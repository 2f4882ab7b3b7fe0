"""What a place is: an engine or a list of hosts that gives machines; on each of them an agent starts the workers.

::

    Request ── decide ──> Placement ── carry_out ──> exit code
    and Options           which command runs on which machine, and what --dry-run prints

An agent is ``paceline run --on local`` with ``--nodes`` and ``--rendezvous``: the first machine holds the coordinator,
the others join it, workers that are lost are replaced, and machines may go and come. A place only starts agents and
says how they ended. For ``paceline doctor`` the agents are doctors, which meet in the same way.
"""

from __future__ import annotations

import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from paceline.config import quoted
from paceline.environments import env
from paceline.errors import ConfigError
from paceline.launchers.base import Examination, Request


@dataclass(frozen=True)
class Options:
    """What the user said about the place; None: nothing. Each place reads some of them."""

    hosts: str | None = None  # host1:4,host2:2
    hostfile: Path | None = None
    time: str | None = None  # as Slurm reads it
    partition: str | None = None
    account: str | None = None
    gpus: int | None = None  # for each machine
    image: str | None = None
    namespace: str | None = None
    kind: str | None = None  # of the Kubernetes object
    volume: str | None = None  # a claim of Kubernetes, for the runs
    address: str | None = None  # of a Ray cluster
    master: str | None = None  # of a Spark cluster
    session: Any = field(default=None, repr=False)  # a SparkSession, from Python only
    slot_cpus: int | None = None  # CPUs of each agent of Ray, several of which may be on a node; from Python only
    detach: bool = False  # submit, and do not wait for the end

    def given(self) -> list[str]:
        """The names of those that are set."""
        return [one.name for one in fields(self) if getattr(self, one.name) not in (None, False)]

    def words(self) -> list[str]:
        """Write them as on the command line."""
        return [
            word
            for name in self.given()
            if name not in ("session", "slot_cpus")
            for word in (f"--{name}", *([] if name == "detach" else [str(getattr(self, name))]))
        ]


@dataclass(frozen=True)
class Agent:
    """The launcher on one machine.

    Attributes:
        machine: its name, as the engine or the user calls it.
        command: what runs there.
        environment: variables besides those that are there; the secret of the run is one.
    """

    machine: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Placement:
    """What is started in a place.

    Attributes:
        place: its name.
        agents: one for each machine, the one with the coordinator first.
        text: for ``--dry-run``: what is submitted or executed, as a person would write it; no secret.
    """

    place: str
    agents: tuple[Agent, ...]
    text: str


class Place(ABC):
    """One kind of place: a file of this folder and a line in ``registry.py``."""

    reads: ClassVar[frozenset[str]] = frozenset()
    """The options that it reads."""
    examines: ClassVar[bool] = True
    """Whether agents may be doctors."""

    @classmethod
    def found(cls, environment: Mapping[str, str]) -> str | None:
        """Say in words how this process can tell that it is in such a place; None: it is not."""
        return None

    @abstractmethod
    def decide(self, request: Request, options: Options, environment: Mapping[str, str]) -> Placement:
        """Decide what to start; nothing is touched yet.

        Raises:
            ConfigError: the options cannot be used.
            StartError: the place is not there, or its engine is not installed.
        """

    @abstractmethod
    def carry_out(self, placement: Placement, request: Request) -> int:
        """Start the agents, show what the first one prints, wait until they end, and give the exit code of the run.

        SIGINT and SIGTERM stop the run after a checkpoint, as they do in ``paceline run`` on one machine.

        Raises:
            StartError: an agent could not be started.
        """


def check_options(name: str, place: type[Place], options: Options) -> None:
    """Refuse options of other places.

    Raises:
        ConfigError: one of them has no effect here.
    """
    for option in options.given():
        if option not in place.reads:
            raise ConfigError(f"--{option} has no effect with --on {name}; leave it out.")


def given_options(request: Request) -> list[str]:
    """Write the options of ``paceline run`` that give this request, but for those that change nothing."""
    fixed = request.least == request.most == request.workers and request.standby
    first, last = request.nodes or (0, 0)
    words = ["-n", str(request.workers)]
    for option, value, usual in (
        ("--name", request.name, None),
        ("--resume", request.resume, None),
        ("--runs-dir", request.runs, Path("runs")),
        ("--runs-mode", f"{request.runs_mode:o}", "700"),
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
    ):
        if value != usual:
            words += [option, f"{value:g}" if isinstance(value, float) else str(value)]
    for key, setting in request.settings.items():
        if key != "resume":
            words += ["--set", f"{key}={setting}"]
    words += [] if request.preload else ["--no-preload"]
    return [*words, "--horovod"] if request.horovod else words


def agent_command(
    request: Request, workers: int, total: int, nodes: tuple[int, int], rendezvous: str, python: str = sys.executable
) -> list[str]:
    """Write the command line of an agent.

    Args:
        request: what the user asked for.
        workers: of this machine.
        total: of all machines.
        nodes: the fewest and the most machines.
        rendezvous: ``host:port`` of the first machine.
        python: the interpreter on the machine.
    """
    if request.examination is not None:
        return _doctor_command(request, request.examination, workers, nodes[1], rendezvous, python)
    words = [python, "-m", "paceline", "run", "--on", "local", "--workers", str(workers)]
    words += ["--nodes", f"{nodes[0]}:{nodes[1]}", "--rendezvous", rendezvous]
    words += ["--elastic", f"{request.least or total}:{request.most or total}"]
    words += ["--patience", f"{request.patience_seconds:g}", "--grace", f"{request.grace_seconds:g}"]
    words += ["--runs-dir", str(request.runs), "--runs-mode", f"{request.runs_mode:o}"]
    for option, value in (
        ("--standby", request.standby or None),
        ("--name", request.name),
        ("--plan", request.plan),
        ("--secret-file", request.secret_file),
    ):
        if value is not None:
            words += [option, str(value)]
    for key, setting in request.settings.items():
        words += ["--set", f"{key}={setting}"]
    if request.horovod:
        words.append("--horovod")
    if not request.preload:
        words.append("--no-preload")
    return [*words, str(request.script), *request.arguments]


def _doctor_command(
    request: Request, wanted: Examination, workers: int, machines: int, rendezvous: str, python: str
) -> list[str]:
    """Write the command line of an agent that examines its machine."""
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


def secret_environment(request: Request) -> dict[str, str]:
    """The variable by which the agents of a run share a secret: the user's, or a new one; none if a file holds it."""
    return {} if request.secret_file is not None else {env.SECRET: env.secret() or secrets.token_hex(32)}


def parse_hosts(text: str, slots: int) -> list[tuple[str, int]]:
    """Parse ``-H host1:4,host2:2``: hosts and their workers.

    Args:
        text: as given.
        slots: workers of a host without a number.

    Raises:
        ConfigError: a number is none, or a host is named twice.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        name, colon, count = part.strip().partition(":")
        if not name or name.startswith("-") or (colon and not (count.isdecimal() and 0 < int(count) < 10_000)):
            raise ConfigError(f"-H {quoted(text)}: give hosts and their numbers of workers, as in -H host1:4,host2:2.")
        if name in found:
            raise ConfigError(f"-H {quoted(text)}: {name} is there twice; give the sum of its workers once.")
        found[name] = int(count) if colon else slots
    return list(found.items())


def read_hostfile(path: Path, slots: int) -> list[tuple[str, int]]:
    """Read the hosts of a file: lines ``host slots=4`` (Open MPI, Horovod), ``host:4`` (MPICH, Intel), or ``host``.

    Raises:
        ConfigError: it cannot be read, a line is of no such form, or it names no host.
    """
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
            raise ConfigError(f"{path}, line {number}: {quoted(line)} begins with no name of a host.")
        given = [word.partition("=")[2] for word in words if word.startswith("slots=")]
        count = count if colon else given[0] if given else str(slots)
        if not (count.isdecimal() and 0 < int(count) < 10_000):
            raise ConfigError(f"{path}, line {number}: {quoted(line)} has no number of slots such as slots=4.")
        found[host] = found.get(host, 0) + int(count)
    if not found:
        raise ConfigError(f"--hostfile {path} names no host.")
    return list(found.items())
