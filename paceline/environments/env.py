"""The only reader of ``os.environ``: what the launcher asked for; who this process is, ``engines/`` decides."""

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
SHOW_CONFIG = "PACELINE_SHOW_CONFIG"
PROFILE = "PACELINE_PROFILE"
COORDINATOR = "PACELINE_COORDINATOR"
WORKER = "PACELINE_WORKER"
WORKER_SECRET = "PACELINE_WORKER_SECRET"
SECRET = "PACELINE_SECRET"
USER_COMMAND = "PACELINE_USER_COMMAND"
END_WITH_PARENT = "PACELINE_END_WITH_PARENT"
EXIT_CODE_FILE = "PACELINE_EXIT_CODE_FILE"
LARGEST = "PACELINE_LARGEST"
ELASTIC = "PACELINE_ELASTIC"
FAULTS = "PACELINE_FAULTS"
ULFM = "PACELINE_ULFM"
_INTEL_BITS = "MPIR_CVAR_CH4_OFI_RANK_BITS", "MPIR_CVAR_CH4_OFI_TAG_BITS"
_ASKED = {TRACE_DIRECTORY, TRACE_STEPS, SHOW_CONFIG, PROFILE, FAULTS}
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
    """Where ``paceline verify`` wants the state of each step, and for how many steps."""

    directory: Path
    steps: int


def _number(name: str, default: int) -> int:
    return number(os.environ, name, default)


def identity() -> Identity:
    """Who this process is; one worker of one when nothing has started it among others."""
    return started_by().identity


def started_by() -> Start:
    """How this process was started, and where it meets the others."""
    return find_start(os.environ)


def choose_mpi() -> None:
    """Let mpi4py load the MPI that has started this process, if several are installed and the user chooses none.

    Told which kind to take, mpi4py does not look where the wheels of MPICH and Intel MPI put it. On some networks Intel
    MPI has fewer tags than a session needs unless it is told to number fewer ranks.
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
    """Whether this is an address of loopback, or its name."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def keep_inside(host: str) -> None:
    """Let gloo and NCCL listen on loopback, unless the user has chosen, if workers meet there."""
    if is_loopback(host) and "lo" in [name for _, name in socket.if_nameindex()]:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")


def use_interface(name: str) -> None:
    """Let gloo use a network interface, unless the user has chosen one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def disable_nccl_error_handling() -> None:
    """Leave it to us to abort NCCL's groups when a worker is lost, unless the user has chosen."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def cublas_workspace() -> str | None:
    """The room that cuBLAS has for each stream, on which its order of additions depends."""
    return os.environ.get("CUBLAS_WORKSPACE_CONFIG")


def tf32_override() -> str | None:
    """What NVIDIA's libraries do with TF32 whatever a program asks for."""
    return os.environ.get("NVIDIA_TF32_OVERRIDE")


def master_port_is_set() -> bool:
    """Whether the user, or torchrun, has chosen a port."""
    return bool(os.environ.get("MASTER_PORT"))


def has_agent_store() -> bool:
    """Whether an agent (torchrun) already holds the store, so that rank 0 must not open it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def thread_limit() -> int | None:
    """The number of threads that the launcher or the user set for each worker."""
    return _number("OMP_NUM_THREADS", 0) or None


def run_directory() -> Path | None:
    """The directory that ``paceline run`` made for this run."""
    return Path(os.environ[RUN_DIRECTORY]) if RUN_DIRECTORY in os.environ else None


def plan_file() -> Path | None:
    """The plan file given to ``paceline run --plan``."""
    return Path(os.environ[PLAN]) if PLAN in os.environ else None


def command_line_settings() -> dict[str, str]:
    """The ``--set key=value`` pairs of the command line."""
    return dict(json.loads(os.environ.get(SETTINGS, "{}")))


def environment_settings(keys: Mapping[str, object]) -> dict[str, str]:
    """``PACELINE_<KEY>`` variables: ``PACELINE_CHECKPOINT__EVERY`` sets ``checkpoint.every``."""
    found = {}
    for key in keys:
        name = variable_of(key)
        if name in os.environ and name not in _RESERVED:
            found[key] = os.environ[name]
    return found


def variable_of(key: str) -> str:
    """The variable that sets a dotted key."""
    return "PACELINE_" + key.upper().replace(".", "__")


def unknown_variables(known: Container[str]) -> list[str]:
    """The ``PACELINE_`` variables that are neither among these nor Paceline's own."""
    return [
        name
        for name in sorted(os.environ)
        if name.startswith("PACELINE_") and name not in _RESERVED and name not in known
    ]


@dataclass(frozen=True)
class LaunchInfo:
    """How a worker finds the others, if it has a coordinator.

    Attributes:
        coordinator: ``host:port`` of the coordinator.
        worker: the number of this process, which stays while its rank may change.
        spare: whether it was started to take the place of another one.
        largest: how many workers there may ever be.
        elastic: whether training goes on when a worker is lost.
        name: what its files are called.
        key: by which it proves to the coordinator that it is this worker of this run.
        ulfm: ``mpiexec --with-ft ulfm`` has started it, and not ``paceline run``.
    """

    coordinator: str
    worker: int
    spare: bool
    largest: int
    elastic: bool
    name: str
    key: bytes = field(repr=False)
    ulfm: bool = False


def launch_info() -> LaunchInfo | None:
    """Find how this worker reaches the others; None when there is no coordinator."""
    if COORDINATOR not in os.environ:
        return None
    number, started = _number(WORKER, 0), _number("LOCAL_WORLD_SIZE", 1)
    spare = number % 1000 >= started
    name = f"rank-{number}" if number < started else f"worker-{number}"
    largest = _number(LARGEST, _number("WORLD_SIZE", 1))
    key = bytes.fromhex(os.environ.get(WORKER_SECRET, ""))
    elastic, ulfm = ELASTIC in os.environ, ULFM in os.environ
    return LaunchInfo(os.environ[COORDINATOR], number, spare, largest, elastic, name, key, ulfm)


def error_record() -> Path | None:
    """Where this worker of ``paceline run`` leaves a record of its failure; None under other launchers."""
    if (folder := run_directory()) is None:
        return None
    launched = launch_info()
    return folder / "errors" / f"{launched.name if launched else f'rank-{identity().rank}'}.json"


def set_launch_info(coordinator: str, worker: int, key: bytes, largest: int) -> None:
    """Set how this worker of ``mpiexec --with-ft ulfm`` finds the others, for :func:`launch_info`."""
    variables = {COORDINATOR: coordinator, WORKER: worker, WORKER_SECRET: key.hex(), LARGEST: largest}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ[ELASTIC] = os.environ[ULFM] = "1"


def set_identity(rank: int, world_size: int, local_rank: int, local_world_size: int) -> None:
    """Set torchrun's variables to what this worker is now, for the script and the libraries it uses."""
    variables = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world_size}
    os.environ.update({name: str(value) for name, value in variables.items()})


def horovod_number(name: str, default: float) -> float:
    """A variable of Horovod, by its name without ``HOROVOD_``.

    Raises:
        ConfigError: it is not a number, or negative.
    """
    text = os.environ.get(f"HOROVOD_{name}") or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"HOROVOD_{name}={text!r} in the environment is not a number from 0 on.")
    return value


def horovod_text(name: str) -> str:
    """A variable of Horovod, by its name without ``HOROVOD_``; empty if it is not set."""
    return os.environ.get(f"HOROVOD_{name}", "")


def horovod_names() -> set[str]:
    """The variables of Horovod that are set, without ``HOROVOD_``."""
    return {name.removeprefix("HOROVOD_") for name in os.environ if name.startswith("HOROVOD_")}


def python_path_with(folder: str) -> dict[str, str]:
    """The variable by which a Python looks in one more folder first."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))}


def set_default(name: str, value: str) -> None:
    """Set a variable of this process that the user has not set."""
    os.environ.setdefault(name, value)


def put(name: str, value: str) -> None:
    """Set a variable of this process, for the workers that it starts."""
    os.environ[name] = value


@contextmanager
def changed(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process for a block."""
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
    """What ``paceline verify`` asked this run to record."""
    if TRACE_DIRECTORY not in os.environ:
        return None
    return Trace(Path(os.environ[TRACE_DIRECTORY]), int(os.environ[TRACE_STEPS]))


def config_report() -> Path | None:
    """The file in which ``paceline config`` wants the settings, instead of a training run."""
    return Path(os.environ[SHOW_CONFIG]) if SHOW_CONFIG in os.environ else None


def profile_report() -> Path | None:
    """The file in which ``paceline profile`` wants what the model costs, instead of a training run."""
    return Path(os.environ[PROFILE]) if PROFILE in os.environ else None


def faults() -> str | None:
    """The faults that a test wants to happen in this run, as JSON (``paceline.testing.faults``)."""
    return os.environ.get(FAULTS)


def inherited() -> dict[str, str]:
    """A copy of the environment, but for the secret of launchers, for the processes that a launcher starts."""
    return {name: value for name, value in os.environ.items() if name != SECRET}


def secret() -> str | None:
    """The secret that launchers on several machines share, if it is given by the environment."""
    return os.environ.get(SECRET)


def in_indexed_job() -> bool:
    """Whether this is a pod of an Indexed Job of Kubernetes."""
    return "JOB_COMPLETION_INDEX" in os.environ


def user_command() -> str | None:
    """The command, but for the script, by which the user started the run in whose place this launcher is an agent."""
    return os.environ.get(USER_COMMAND)


def ends_with_parent() -> bool:
    """Whether this launcher is to be killed when the process that started it has ended."""
    return END_WITH_PARENT in os.environ


def exit_code_file() -> Path | None:
    """Where this launcher is to write its exit code, which what started it may not pass on."""
    return Path(os.environ[EXIT_CODE_FILE]) if EXIT_CODE_FILE in os.environ else None


def replace(variables: Mapping[str, str]) -> None:
    """Put other variables in the place of all: for a copy of a process that becomes a worker."""
    os.environ.clear()
    os.environ.update(variables)


def set_horovod_identity(who: Identity) -> None:
    """Set what ``horovodrun`` sets, for scripts that read it."""
    variables = {
        "RANK": who.rank,
        "SIZE": who.world_size,
        "LOCAL_RANK": who.local_rank,
        "LOCAL_SIZE": who.local_world_size,
    }
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in variables.items()})
