"""Access to environment variables for all other modules. ``find`` derives this process's identity from them."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import sys
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from paceline.environments.find import find_start
from paceline.environments.start import Identity, Start, number
from paceline.errors import ConfigError

RUN_DIRECTORY = "PACELINE_RUN"
SETTINGS = "PACELINE_SET"
PLAN = "PACELINE_PLAN"
TRACE_DIRECTORY = "PACELINE_TRACE"
TRACE_STEPS = "PACELINE_TRACE_STEPS"
TRIED_STEPS = "PACELINE_TRIED_STEPS"  # number of steps after which a run of ``paceline plan`` ends
REPLAY = "PACELINE_REPLAY"  # request of ``paceline replay``, as JSON
BRANCH = "PACELINE_BRANCH"  # branch of ``paceline tune``, as JSON
SHOW_CONFIG = "PACELINE_SHOW_CONFIG"  # file to write the settings to for ``paceline config``, instead of training
PROFILE = "PACELINE_PROFILE"  # file to write layer costs to for ``paceline profile``, instead of training
COORDINATOR = "PACELINE_COORDINATOR"
WORKER = "PACELINE_WORKER"
WORKER_SECRET = "PACELINE_WORKER_SECRET"
SECRET = "PACELINE_SECRET"  # secret that launchers on several machines share
USER_COMMAND = "PACELINE_USER_COMMAND"  # user's command without the script, if it has started this launcher as an agent
END_WITH_PARENT = "PACELINE_END_WITH_PARENT"  # set if this launcher must be killed when its parent process ends
EXIT_CODE_FILE = "PACELINE_EXIT_CODE_FILE"  # file for the exit code, which the parent process may not pass on
LARGEST = "PACELINE_LARGEST"
ELASTIC = "PACELINE_ELASTIC"
FAULTS = "PACELINE_FAULTS"  # fault plan of a test as JSON (``paceline.testing.faults``)
ULFM = "PACELINE_ULFM"
_INTEL_BITS = "MPIR_CVAR_CH4_OFI_RANK_BITS", "MPIR_CVAR_CH4_OFI_TAG_BITS"
_ASKED = {TRACE_DIRECTORY, TRACE_STEPS, TRIED_STEPS, REPLAY, BRANCH, SHOW_CONFIG, PROFILE, FAULTS}
_OF_AGENTS = {SECRET, USER_COMMAND, END_WITH_PARENT, EXIT_CODE_FILE}
_RESERVED = {
    RUN_DIRECTORY,
    SETTINGS,
    PLAN,
    COORDINATOR,
    WORKER,
    WORKER_SECRET,
    LARGEST,
    ELASTIC,
    ULFM,
    *_OF_AGENTS,
    *_ASKED,
}


@dataclass(frozen=True)
class Trace:
    """Request of ``paceline verify``: the directory to record each step in, and the number of steps."""

    directory: Path
    steps: int


@dataclass(frozen=True)
class Replay:
    """Request of ``paceline replay``: the step after which the run ends, and what to observe in it."""

    step: int
    observe: str  # values that ``diagnostics.replay.observer`` shows. Empty to only repeat the step.
    directory: Path  # folder for values that are too large for a record


@dataclass(frozen=True)
class Branch:
    """Branch of ``paceline tune``: a short run with other learning rates than those of the script.

    ::

        factor  last                    ●
                                  ●           The script's first rate times the factor, which grows by the same ratio
                            ●                 in each step. The script's schedule has no effect.
                first ●
                step  0  ...        steps - 1
    """

    steps: int
    first: float
    last: float

    def factor(self, step: int) -> float:
        """Return the ratio of the learning rate of a step to the script's first one."""
        return float(self.first * (self.last / self.first) ** (step / max(1, self.steps - 1)))


def _number(name: str, default: int) -> int:
    return number(os.environ, name, default)


def text(name: str) -> str | None:
    """Return the value of a variable; None if it is not set."""
    return os.environ.get(name)


def path(name: str) -> Path | None:
    """Return the path in a variable; None if it is not set."""
    return Path(os.environ[name]) if name in os.environ else None


def identity() -> Identity:
    """Return the rank and world size of this process: rank 0 of 1 if no launcher has started it."""
    return started_by().identity


def started_by() -> Start:
    """Return how this process was started: the engine, its identity, and the rendezvous address."""
    return find_start(os.environ)


def choose_mpi() -> None:
    """Set the variables that make mpi4py load the MPI that has started this process, unless the user has set them.

    MPI4PY_MPIABI alone does not find a library that was installed by a wheel of MPICH or Intel MPI. On some networks
    Intel MPI has fewer tags than a session needs, unless fewer bits are reserved for ranks.
    """
    start = started_by()
    if start.engine == "Intel MPI" and not any(name in os.environ for name in _INTEL_BITS):
        bits = max(10, (start.identity.world_size - 1).bit_length())
        os.environ.update(zip(_INTEL_BITS, (str(bits), str(39 - bits)), strict=True))
    interface = {"Open MPI": "openmpi", "MPICH": "mpich", "Intel MPI": "mpich"}.get(start.engine)
    if interface is None or not {"MPI4PY_MPIABI", "MPI4PY_LIBMPI"}.isdisjoint(os.environ):
        return
    wheel = Path(sys.prefix, "lib", "libmpi.so.12")
    if interface == "mpich" and wheel.exists():
        os.environ["MPI4PY_LIBMPI"] = str(wheel)
    else:
        os.environ["MPI4PY_MPIABI"] = interface


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def keep_inside(host: str) -> None:
    """Make gloo and NCCL use the loopback interface if ``host`` is loopback, unless the user has set an interface."""
    if is_loopback(host) and "lo" in [name for _, name in socket.if_nameindex()]:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")


def thread_limit() -> int | None:
    """Return the number of threads per worker that the launcher or user has set; None if not set."""
    return _number("OMP_NUM_THREADS", 0) or None


def run_directory() -> Path | None:
    """Return the directory that ``paceline run`` created for this run; None under other launchers."""
    return path(RUN_DIRECTORY)


def plan_file() -> Path | None:
    """Return the plan file given to ``paceline run --plan``, if any."""
    return path(PLAN)


def command_line_settings() -> dict[str, str]:
    """Return the ``--set key=value`` pairs of the command line."""
    return dict(json.loads(os.environ.get(SETTINGS, "{}")))


def environment_settings(keys: Mapping[str, object]) -> dict[str, str]:
    """Return the values of ``PACELINE_<KEY>`` variables: ``PACELINE_CHECKPOINT__EVERY`` sets ``checkpoint.every``."""
    found = {}
    for key in keys:
        name = variable_of(key)
        if name in os.environ and name not in _RESERVED:
            found[key] = os.environ[name]
    return found


def variable_of(key: str) -> str:
    """Return the name of the variable that sets a dotted key."""
    return "PACELINE_" + key.upper().replace(".", "__")


def unknown_variables(known: Container[str]) -> list[str]:
    """Return the ``PACELINE_`` variables that are neither in ``known`` nor reserved, sorted."""
    return [
        name
        for name in sorted(os.environ)
        if name.startswith("PACELINE_") and name not in _RESERVED and name not in known
    ]


@dataclass(frozen=True)
class LaunchInfo:
    """Launch parameters of a worker with a coordinator."""

    coordinator: str  # ``host:port`` of the coordinator
    worker: int  # number of this worker process, which never changes, unlike its rank
    spare: bool  # whether this worker was started as a replacement or standby
    largest: int  # largest number of workers that the run may ever have
    least: int  # smallest number of workers with which training continues when one is lost. 0: any loss ends the run
    name: str  # base name of this worker's files
    key: bytes = field(repr=False)  # key with which this worker authenticates to the coordinator
    ulfm: bool = False  # whether ``mpiexec --with-ft ulfm`` has started this worker instead of ``paceline run``

    @property
    def elastic(self) -> bool:
        """Whether training continues when a worker is lost."""
        return self.least > 0


def launch_info() -> LaunchInfo | None:
    """Return the launch parameters of this worker; None if the run has no coordinator."""
    if COORDINATOR not in os.environ:
        return None
    number, started = _number(WORKER, 0), _number("LOCAL_WORLD_SIZE", 1)
    spare = number % 1000 >= started
    name = f"rank-{number}" if number < started else f"worker-{number}"
    largest = _number(LARGEST, _number("WORLD_SIZE", 1))
    key = bytes.fromhex(os.environ.get(WORKER_SECRET, ""))
    least = _number(ELASTIC, 0)
    return LaunchInfo(os.environ[COORDINATOR], number, spare, largest, least, name, key, ULFM in os.environ)


def survives_losses() -> bool:
    """Return whether training continues when a worker is lost."""
    launched = launch_info()
    return launched is not None and (launched.elastic or launched.ulfm)


def error_record() -> Path | None:
    """Return the path of this worker's failure record under ``paceline run``; None under other launchers."""
    if (folder := run_directory()) is None:
        return None
    launched = launch_info()
    return folder / "errors" / f"{launched.name if launched else f'rank-{identity().rank}'}.json"


def set_launch_info(coordinator: str, worker: int, key: bytes, largest: int) -> None:
    """Set the variables that :func:`launch_info` reads, for a worker of ``mpiexec --with-ft ulfm``."""
    variables = {COORDINATOR: coordinator, WORKER: worker, WORKER_SECRET: key.hex(), LARGEST: largest}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ[ELASTIC] = os.environ[ULFM] = "1"


def set_identity(rank: int, world_size: int, local_rank: int, local_world_size: int) -> None:
    """Set torchrun's variables to this worker's current rank and world size, for the script and its libraries."""
    variables = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world_size}
    os.environ.update({name: str(value) for name, value in variables.items()})


def horovod_number(name: str, default: float) -> float:
    """Return the number in a Horovod variable, given its name without ``HOROVOD_``."""
    text = os.environ.get(f"HOROVOD_{name}") or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"HOROVOD_{name}={text!r} in the environment is not a number of at least 0.")
    return value


def horovod_names() -> set[str]:
    """Return the names of the Horovod variables that are set, without ``HOROVOD_``."""
    return {name.removeprefix("HOROVOD_") for name in os.environ if name.startswith("HOROVOD_")}


def python_path_with(folder: str) -> dict[str, str]:
    """Return a PYTHONPATH variable with a folder put before the current entries."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))}


def set_default(name: str, value: str) -> None:
    """Set a variable of this process, unless the user has set it."""
    os.environ.setdefault(name, value)


def put(name: str, value: str) -> None:
    """Set a variable of this process, which its workers inherit."""
    os.environ[name] = value


@contextmanager
def changed(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process inside a block, and restore them at its end."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def trace() -> Trace | None:
    """Return the request of ``paceline verify``, if any."""
    if TRACE_DIRECTORY not in os.environ:
        return None
    return Trace(Path(os.environ[TRACE_DIRECTORY]), int(os.environ[TRACE_STEPS]))


def tried_steps() -> int | None:
    """Return the number of steps that ``paceline plan`` tries, if it has started this run."""
    return int(os.environ[TRIED_STEPS]) if TRIED_STEPS in os.environ else None


def replay() -> Replay | None:
    """Return the request of ``paceline replay``, if any."""
    if REPLAY not in os.environ:
        return None
    asked = json.loads(os.environ[REPLAY])
    return Replay(asked["step"], asked["observe"], Path(asked["directory"]))


def branch() -> Branch | None:
    """Return this run's branch of ``paceline tune``, if any."""
    return Branch(**json.loads(os.environ[BRANCH])) if BRANCH in os.environ else None


def starts_anew() -> bool:
    """Return whether this run starts from the script's beginning, even if the script resumes."""
    return not {TRACE_DIRECTORY, BRANCH, TRIED_STEPS}.isdisjoint(os.environ)


def is_rehearsal() -> bool:
    """Return whether this run only examines steps, so that it sends no reports and leaves no files behind."""
    return starts_anew() or REPLAY in os.environ


def inherited() -> dict[str, str]:
    """Return a copy of the environment without the launchers' secret, for processes that a launcher starts."""
    return {name: value for name, value in os.environ.items() if name != SECRET}


def replace(variables: Mapping[str, str]) -> None:
    """Replace the whole environment. Used by a forked process that becomes a worker."""
    os.environ.clear()
    os.environ.update(variables)


def set_horovod_identity(who: Identity) -> None:
    """Set the variables that ``horovodrun`` sets, for scripts that read them."""
    variables = {
        "RANK": who.rank,
        "SIZE": who.world_size,
        "LOCAL_RANK": who.local_rank,
        "LOCAL_SIZE": who.local_world_size,
    }
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in variables.items()})
