"""What a launcher is: it decides as data what to start, starts it, waits, and says how each worker ended.

::

    Request ── decide ──> Launch ── start ──> WorkerProcess ── poll ──> WorkerExit
    what the user         how each worker     one worker                its exit code,
    asked for             starts                                        and why

A worker is an ordinary process that runs the script. It learns its rank from torchrun's variables and the run
directory from ``PACELINE_RUN``.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from paceline.environments import env
from paceline.system.secret import Secret

if TYPE_CHECKING:
    from paceline.settings import Settings

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Examination:
    """What ``paceline doctor`` looks at besides the machines, and how it reports."""

    script: Path | None = None
    data: Path | None = None
    checkpoints: Path | None = None
    verbose: bool = False
    as_json: bool = False


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    script: Path
    arguments: tuple[str, ...] = ()
    workers: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)
    plan: Path | None = None
    runs: Path = Path("runs")
    runs_mode: int = 0o700  # permissions of a new run directory
    name: str | None = None
    port: int | None = None
    least: int | None = None  # training waits below this number of workers; None: every loss ends the run
    most: int | None = None
    standby: int = 0  # workers that wait to replace lost ones
    patience_seconds: float = 600.0  # to wait for replacements below the least number
    grace_seconds: float = 25.0  # to finish a step and save after a signal
    nodes: tuple[int, int] | None = None  # fewest and most machines; None: this one alone
    rendezvous: str | None = None  # host:port of the first machine
    secret_file: Path | None = None  # by which the machines share a secret
    first: int = 0  # number of the first worker here; above zero on all machines but the first
    environment: Mapping[str, str] = field(default_factory=dict)  # more variables for the workers
    launcher: str = "local"  # a name in the registry
    horovod: bool = False  # scripts find Paceline's ``horovod``: see ``environment``
    discovery: Path | None = None  # a script that says how many workers there may be now
    preload: bool = True  # fork workers from a process that has imported torch, if the launcher can
    examination: Examination | None = None  # of the machines, instead of training on them; it has the script

    @property
    def elastic(self) -> bool:
        """Whether training goes on when a worker is lost."""
        return self.least is not None or self.nodes is not None

    @property
    def largest(self) -> int:
        """How many workers there may be at most."""
        return self.most or self.workers * (self.nodes[1] if self.nodes else 1)

    @property
    def files(self) -> tuple[Path, ...]:
        """What must be on every machine before the start; the doctor says itself what is missing."""
        return () if self.examination else tuple(one for one in (self.script, self.plan) if one is not None)

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
class WorkerSpec:
    """How one worker starts."""

    number: int
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    cores: frozenset[int] = frozenset()  # empty: the system decides


@dataclass(frozen=True)
class Launch:
    """Everything that decides how the workers start."""

    script: Path
    arguments: tuple[str, ...]
    workers: int
    run: Path
    environment: Mapping[str, str]  # the same for every worker
    cores: tuple[frozenset[int], ...] = ()  # of each worker; empty: the system decides
    coordinator: str | None = None  # host:port where workers find each other; None: by torchrun's variables
    secret: Secret | None = None  # of this run, if there is a coordinator
    first: int = 0
    grace_seconds: float = 25.0
    launcher: str = "local"
    preload: bool = False

    def command(self) -> tuple[str, ...]:
        """What each worker executes."""
        return (sys.executable, "-u", str(self.script), *self.arguments)

    def worker(self, number: int, local_rank: int) -> WorkerSpec:
        """How one worker starts; its device follows from its local rank."""
        own = {name: str(local_rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")}
        if self.coordinator is not None and self.secret is not None:
            key = self.secret.key(f"worker {number}").hex()
            own |= {env.COORDINATOR: self.coordinator, env.WORKER: str(number), env.WORKER_SECRET: key}
        cores = self.cores[number % len(self.cores)] if self.cores else frozenset()
        return WorkerSpec(number, self.command(), {**self.environment, **own}, cores)

    def name(self, number: int) -> str:
        """Name the files of a worker: by its rank, or by its number if it was started to join later."""
        return f"rank-{number}" if number < self.workers else f"worker-{number}"

    def output(self, number: int) -> Path:
        """The file with everything that a worker printed."""
        return self.run / "output" / f"{self.name(number)}.log"

    def error(self, number: int) -> Path:
        """The file in which a worker reports why it failed."""
        return self.run / "errors" / f"{self.name(number)}.json"


@dataclass(frozen=True)
class WorkerExit:
    """How one worker ended."""

    worker: int  # its number: its rank at the start
    code: int  # negative: the signal that killed it
    time: float
    stopped: bool  # the launcher had asked it to end
    tolerated: bool = False  # training went on without it
    pid: int = 0
    out_of_memory: bool = False  # the kernel had just killed a process for lack of memory

    @property
    def exit_code(self) -> int:
        """As a shell counts: 128 + the signal."""
        return self.code if self.code >= 0 else 128 - self.code


@dataclass(frozen=True)
class RunResult:
    """How a launch ended."""

    exits: tuple[WorkerExit, ...]
    signal: int | None  # sent to the launcher
    seconds: float


class WorkerProcess(Protocol):
    """A worker that was started; ``subprocess.Popen`` is one."""

    @property
    def pid(self) -> int:
        """The process on this machine; 0 if it runs elsewhere."""
        ...

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the worker runs."""
        ...

    def send_signal(self, sig: int, /) -> None:
        """Send a signal to the worker alone."""
        ...

    def kill(self) -> None:
        """Kill the worker and all that it started, even if the worker itself has ended."""
        ...


class Launcher(ABC):
    """One kind of place where workers run: a file of this folder and a line in ``registry.py``.

    A new launcher must write ``start``. There is one instance for each launch.
    """

    note: Callable[[str], None] = staticmethod(lambda text: None)
    """Called with a line for the user."""

    @classmethod
    def decide(
        cls,
        request: Request,
        settings: Settings,
        machine: Machine,
        inherited: Mapping[str, str],
        run: Path,
        port: int,
    ) -> Launch:
        """Decide everything about a launch; nothing is touched yet.

        Args:
            request: what the user asked for.
            settings: as far as they are known before the script runs.
            machine: this machine.
            inherited: environment variables for the workers.
            run: the run directory.
            port: a free one.
        """
        return lay_out(request, settings, machine, inherited, run, port)

    @classmethod
    def begin_early(cls, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Begin before anything is checked, for workers that are likely to start like this."""
        return None

    @classmethod
    def end_early(cls) -> None:
        """End what was begun early, if no launch has taken it."""
        return None

    def begin(self, launch: Launch) -> None:
        """Begin with what takes long and is needed before the first worker starts."""
        return None

    def wait_until_ready(self, stop: Callable[[], bool]) -> None:
        """Wait until workers can be started; no longer if `stop` returns true."""
        return None

    def starts_at_once(self) -> bool:
        """Whether a worker that starts now keeps no core busy for seconds."""
        return False

    @abstractmethod
    def start(self, worker: WorkerSpec, stdout: int, stderr: int) -> WorkerProcess:
        """Start a worker that prints to these two file descriptors, which the caller closes.

        Raises:
            OSError: it could not be started.
        """

    def ran_out_of_memory(self) -> bool:
        """Whether the worker that has just failed was killed for lack of memory, as far as that is known."""
        return False

    def close(self) -> None:
        """Free what the launcher holds; all workers have ended."""
        return None


def bind(domains: tuple[frozenset[int], ...], workers: int) -> tuple[frozenset[int], ...]:
    """Bind each worker to the cores of one memory domain, or of several if there are fewer workers.

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
    """Choose how many threads each worker computes with."""
    if settings.threads is not None:
        return settings.threads
    return 1 if settings.exact else max(1, cores // workers)


def pays_preload(workers: int, standby: int, elastic: object) -> bool:
    """Return whether several workers of this machine, or their replacements, would share one import of torch."""
    return workers + standby > (0 if elastic else 1)


def library_variables(threads: int) -> dict[str, str]:
    """Return the variables that Python and its libraries read when they start, unless the user has set them."""
    return {
        "PYTHONHASHSEED": "0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # the launcher reports a lost worker, once
        "OMP_NUM_THREADS": str(threads),
    }


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
        shared[env.ELASTIC] = "1"
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
