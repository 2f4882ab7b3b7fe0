"""Launcher interface and its data: plan a launch, start workers, poll them, report how each worker ended.

::

    Request ── decide ──> Launch ── start ──> WorkerProcess ── poll ──> WorkerExit
    what the user         how each worker     one worker                its exit code,
    asked for             starts                                        and why

A worker is an ordinary process that runs the script. It reads its rank from torchrun's variables and the run
directory from ``PACELINE_RUN``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from paceline.environments import env
from paceline.system.secret import Secret

if TYPE_CHECKING:
    from paceline.settings import Settings

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Examination:
    """Options of ``paceline doctor``: what to examine besides the machines, and the format of the report."""

    script: Path | None = None
    data: Path | None = None
    checkpoints: Path | None = None
    verbose: bool = False
    as_json: bool = False


@dataclass(frozen=True)
class Request:
    """Launch request of the user: script, number of workers, settings and options."""

    script: Path
    arguments: tuple[str, ...] = ()
    workers: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)
    plan: Path | None = None
    runs: Path = Path("runs")
    name: str | None = None
    port: int | None = None
    least: int | None = None  # minimum number of workers; training pauses below it. None: any loss ends the run
    most: int | None = None
    standby: int = 0  # spare workers that wait to replace lost workers
    patience_seconds: float = 600.0  # time limit for replacements to join while fewer than `least` workers are left
    grace_seconds: float = 25.0  # time to finish a step and save after a signal
    nodes: tuple[int, int] | None = None  # minimum and maximum number of machines; None: this machine only
    rendezvous: str | None = None  # host:port of the first machine
    secret_file: Path | None = None  # file with the secret that the machines share
    first: int = 0  # number of this machine's first worker; above zero on all machines but the first
    environment: Mapping[str, str] = field(default_factory=dict)  # additional variables for the workers
    launcher: str = "local"  # a name in the registry
    horovod: bool = False  # scripts import Paceline's ``horovod``, which `environment` makes importable
    discovery: Path | None = None  # script that prints the current number of worker slots of each host
    preload: bool = True  # fork workers from a process that has imported torch, if the launcher can
    alerts: tuple[str, ...] = ()  # conditions, such as ``stalled > 60s``
    notify: str | None = None  # command or URL that receives the alerts
    examination: Examination | None = None  # examine the machines instead of training; includes the script

    @property
    def elastic(self) -> bool:
        """Whether training continues after the loss of a worker."""
        return self.least is not None or self.nodes is not None

    @property
    def smallest(self) -> int:
        """Minimum number of workers with which the run trains."""
        return self.least or self.workers * (self.nodes[0] if self.nodes else 1)

    @property
    def largest(self) -> int:
        return self.most or self.workers * (self.nodes[1] if self.nodes else 1)

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that every machine must have before the start. Empty for the doctor, which reports missing files."""
        return () if self.examination else tuple(one for one in (self.script, self.plan) if one is not None)

    @property
    def resume(self) -> str | None:
        """Checkpoint to start from: ``auto``, a path or URL, or None."""
        return self.settings.get("resume")

    def absolute(self) -> Request:
        """Return the request with absolute paths, for machines that share them."""
        return replace(
            self,
            script=self.script.absolute(),
            runs=self.runs.absolute(),
            plan=self.plan and self.plan.absolute(),
            secret_file=self.secret_file and self.secret_file.absolute(),
        )


@dataclass(frozen=True)
class Machine:
    """Cores that this process may use, grouped by memory domain."""

    cores: frozenset[int]
    domains: tuple[frozenset[int], ...] = ()


@dataclass(frozen=True)
class WorkerSpec:
    """Command, environment and cores of one worker."""

    number: int
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    cores: frozenset[int] = frozenset()  # empty: not bound


@dataclass(frozen=True)
class Launch:
    """Launch plan of the workers on this machine."""

    script: Path
    arguments: tuple[str, ...]
    workers: int
    run: Path
    environment: Mapping[str, str]  # variables that all workers share
    cores: tuple[frozenset[int], ...] = ()  # cores of each worker; empty: not bound
    coordinator: str | None = None  # host:port of the coordinator; None: rendezvous by torchrun's variables
    secret: Secret | None = None  # the run's secret, if the run has a coordinator
    first: int = 0
    grace_seconds: float = 25.0
    launcher: str = "local"
    preload: bool = False

    def command(self) -> tuple[str, ...]:
        return (sys.executable, "-u", str(self.script), *self.arguments)

    def worker(self, number: int, local_rank: int) -> WorkerSpec:
        """Return the specification of one worker. Its local rank selects its device."""
        own = {name: str(local_rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")}
        if self.coordinator is not None and self.secret is not None:
            key = self.secret.key(f"worker {number}").hex()
            own |= {env.COORDINATOR: self.coordinator, env.WORKER: str(number), env.WORKER_SECRET: key}
        cores = self.cores[number % len(self.cores)] if self.cores else frozenset()
        return WorkerSpec(number, self.command(), {**self.environment, **own}, cores)

    def name(self, number: int) -> str:
        """Return the base name of a worker's files: its rank, or its number if it was started after the launch."""
        return f"rank-{number}" if number < self.workers else f"worker-{number}"

    def output(self, number: int) -> Path:
        """Return the path of the log with a worker's entire output."""
        return self.run / "output" / f"{self.name(number)}.log"

    def error(self, number: int) -> Path:
        """Return the path of a worker's failure report."""
        return self.run / "errors" / f"{self.name(number)}.json"


@dataclass(frozen=True)
class WorkerExit:
    """Exit of one worker."""

    worker: int  # number of the worker: its rank at the start
    code: int  # exit code, or the negative number of the signal that killed the worker
    time: float
    stopped: bool  # the launcher had asked the worker to end
    tolerated: bool = False  # training continued without the worker
    pid: int = 0
    out_of_memory: bool = False  # the kernel had just killed a process for lack of memory

    @property
    def exit_code(self) -> int:
        """Exit code as a shell reports it: 128 + the signal number if a signal ended the worker."""
        return self.code if self.code >= 0 else 128 - self.code


@dataclass(frozen=True)
class RunResult:
    """Result of a launch."""

    exits: tuple[WorkerExit, ...]
    signal: int | None  # first signal that the launcher received
    seconds: float


class WorkerProcess(Protocol):
    """Handle of a started worker. ``subprocess.Popen`` satisfies this protocol."""

    @property
    def pid(self) -> int:
        """Process id on this machine, or 0 if the worker runs on another machine."""

    def poll(self) -> int | None:
        """Return the exit code (negative for a signal), or None while the worker runs."""

    def send_signal(self, sig: int, /) -> None:
        """Send a signal to the worker process only."""

    def kill(self) -> None:
        """Kill the worker and all processes it started, even if the worker itself has ended."""


class Launcher:
    """Base class of launchers. Each launcher is a module of this package and an entry in ``registry.py``.

    A new launcher must implement ``start``. Each launch creates one instance.
    """

    note: Callable[[str], None] = staticmethod(lambda text: None)  # callback that receives lines for the user

    @classmethod
    def decide(
        cls,
        request: Request,
        settings: Settings,  # settings that are known before the script runs
        machine: Machine,
        inherited: Mapping[str, str],
        run: Path,
        port: int,  # free port for the workers' rendezvous
    ) -> Launch:
        """Return the launch plan, without any side effects."""
        workers = str(request.workers)
        shared = {
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            **library_variables(threads_per_worker(settings, max(1, request.workers), len(machine.cores))),
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
            env.LARGEST: str(request.largest),
        }
        if request.elastic:
            shared[env.ELASTIC] = str(request.smallest)
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
            launcher=request.launcher,
            preload=request.preload and pays_preload(request.workers, request.standby, request.elastic),
        )

    @classmethod
    def begin_early(cls, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start slow preparations before the request is checked, for the expected command and environment."""

    @classmethod
    def end_early(cls) -> None:
        """Undo ``begin_early`` unless a launch uses its result."""

    def begin(self, launch: Launch) -> None:
        """Start slow preparations that must finish before the first worker starts."""

    def wait_until_ready(self, stop: Callable[[], bool]) -> None:
        """Wait until workers can be started. Return early if `stop` returns true."""

    def starts_at_once(self) -> bool:
        """Return whether workers start without using a core for seconds, as the import of torch does."""
        return False

    def start(self, worker: WorkerSpec, stdout: int, stderr: int) -> WorkerProcess:
        """Start a worker that writes its output to these two file descriptors. The caller closes them.

        Raises:
            OSError: the worker could not be started.
        """
        raise NotImplementedError

    def ended(self, worker: WorkerProcess) -> None:
        """Forget a worker that has ended and whose process group has been killed."""

    def ran_out_of_memory(self) -> bool:
        """Return whether the worker that has just failed was killed for lack of memory. False if unknown."""
        return False

    def close(self) -> None:
        """Free the launcher's resources after all workers have ended."""


def bind(domains: tuple[frozenset[int], ...], workers: int) -> tuple[frozenset[int], ...]:
    """Assign the cores of a memory domain to each worker, or of several domains if there are fewer workers.

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
    if settings.threads is not None:
        return settings.threads
    return 1 if settings.exact else max(1, cores // workers)


def pays_preload(workers: int, standby: int, elastic: object) -> bool:
    """Return whether at least two workers of this machine, counting replacements, would share an import of torch."""
    return workers + standby > (0 if elastic else 1)


def library_variables(threads: int) -> dict[str, str]:
    """Return default values for variables that Python and its libraries read at startup. User values override them."""
    return {
        "PYTHONHASHSEED": "0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # the launcher reports a lost worker once
        "OMP_NUM_THREADS": str(threads),
    }
