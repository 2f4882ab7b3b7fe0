"""What to start, as plain data: :class:`Request` is what the user asked for, :class:`Launch` what happens.

A worker is an ordinary process that runs the script. It learns who it is from torchrun's variables and where
the run is kept from ``PACELINE_RUN``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline import env
from paceline.settings import Settings

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    script: Path
    arguments: tuple[str, ...] = ()
    workers: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)
    plan: Path | None = None
    runs: Path = Path("runs")
    name: str | None = None
    port: int | None = None
    least: int | None = None  # fewer workers do not train; none: all or nothing
    most: int | None = None
    standby: int = 0  # workers that wait to take the place of lost ones
    patience_seconds: float = 600.0  # for replacements, below the least number
    grace_seconds: float = 25.0  # to finish a step and save after a signal
    nodes: tuple[int, int] | None = None  # fewest and most machines; none: this one alone
    rendezvous: str | None = None  # host:port of the first machine
    first: int = 0  # the number of the first worker here; above zero on other machines than the first
    environment: Mapping[str, str] = field(default_factory=dict)  # more variables for the workers

    @property
    def elastic(self) -> bool:
        """Whether training goes on when a worker is lost."""
        return self.least is not None or self.nodes is not None

    @property
    def resume(self) -> str | None:
        """The checkpoint to start from: ``auto``, a path, or none."""
        return self.settings.get("resume")


@dataclass(frozen=True)
class Machine:
    """The cores that this process may use, and how memory divides them."""

    cores: frozenset[int]
    domains: tuple[frozenset[int], ...] = ()


@dataclass(frozen=True)
class Launch:
    """Everything that decides how the workers start."""

    script: Path
    arguments: tuple[str, ...]
    workers: int
    run: Path
    environment: Mapping[str, str]  # the same for every worker
    cores: tuple[frozenset[int], ...] = ()  # of each worker; empty: the system decides
    roster: str | None = None  # where workers find each other; none: by torchrun's variables
    first: int = 0
    grace_seconds: float = 25.0

    def command(self) -> list[str]:
        """What each worker executes."""
        return [sys.executable, "-u", str(self.script), *self.arguments]

    def worker_environment(self, number: int, place: int | None = None) -> dict[str, str]:
        """The variables of one worker; ``place`` is its local rank, and with it its device."""
        place = (number - self.first) % self.workers if place is None else place
        mine = {name: str(place) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")}
        if self.roster is not None:
            mine |= {env.ROSTER: self.roster, env.WORKER: str(number)}
        return {**self.environment, **mine}

    def name(self, number: int) -> str:
        """What the files of a worker are called: by its rank, or by its number if it was started to join later."""
        return f"rank-{number}" if number < self.workers else f"worker-{number}"

    def output(self, number: int) -> Path:
        """The file with everything that a worker printed."""
        return self.run / "output" / f"{self.name(number)}.log"

    def error(self, number: int) -> Path:
        """The file in which a worker says why it failed."""
        return self.run / "errors" / f"{self.name(number)}.json"


def bind(domains: tuple[frozenset[int], ...], workers: int) -> tuple[frozenset[int], ...]:
    """The cores of each worker: those of one memory domain, or of several when there are fewer workers.

    ::

        2 domains, 4 workers    0 0 1 1
        4 domains, 2 workers    0+1 2+3
        1 domain                not bound
    """
    count = len(domains)
    if count < 2:
        return ()
    bound = []
    for rank in range(workers):
        first, last = rank * count // workers, (rank + 1) * count // workers
        bound.append(frozenset().union(*domains[first : max(first + 1, last)]))
    return tuple(bound)


def threads_per_worker(settings: Settings, workers: int, cores: int) -> int:
    """How many threads each worker computes with."""
    if settings.threads is not None:
        return settings.threads
    return 1 if settings.exact else max(1, cores // workers)


def lay_out(
    request: Request,
    settings: Settings,
    machine: Machine,
    inherited: Mapping[str, str],
    run: Path,
    port: int,
) -> Launch:
    """Decide everything about a launch; nothing is touched yet."""
    workers = str(request.workers)
    shared = {
        "PYTHONHASHSEED": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # what breaks when a worker is lost is told once, by us
        "OMP_NUM_THREADS": str(threads_per_worker(settings, request.workers, len(machine.cores))),
        **inherited,
        **request.environment,
        "WORLD_SIZE": str(request.workers * (request.nodes[0] if request.nodes else 1)),
        "LOCAL_WORLD_SIZE": workers,
        "ROLE_WORLD_SIZE": workers,
        "ROLE_NAME": "default",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run.name,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        env.RUN_DIRECTORY: str(run),
        env.SETTINGS: json.dumps(dict(request.settings)),
        env.LARGEST: str(request.most or request.workers * (request.nodes[1] if request.nodes else 1)),
    }
    if settings.threads is not None:
        shared["OMP_NUM_THREADS"] = str(settings.threads)
    if request.plan is not None:
        shared[env.PLAN] = str(request.plan.resolve())
    return Launch(
        script=request.script,
        arguments=request.arguments,
        workers=request.workers,
        run=run,
        environment=shared,
        cores=bind(machine.domains, request.workers),
        grace_seconds=request.grace_seconds,
        first=request.first,
    )
