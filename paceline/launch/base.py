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
from paceline.config import Settings

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
    environment: Mapping[str, str] = field(default_factory=dict)  # more variables for the workers

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

    def command(self) -> list[str]:
        """What each worker executes."""
        return [sys.executable, "-u", str(self.script), *self.arguments]

    def worker_environment(self, rank: int) -> dict[str, str]:
        """The variables of one worker."""
        mine = {name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")}
        return {**self.environment, **mine}

    def output(self, rank: int) -> Path:
        """The file with everything that a worker printed."""
        return self.run / "output" / f"rank-{rank}.log"

    def error(self, rank: int) -> Path:
        """The file in which a worker says why it failed."""
        return self.run / "errors" / f"rank-{rank}.json"


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
        "OMP_NUM_THREADS": str(threads_per_worker(settings, request.workers, len(machine.cores))),
        **inherited,
        **request.environment,
        "WORLD_SIZE": workers,
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
    )
