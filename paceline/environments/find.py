"""Detection of the engine that started this process, from environment variables.

There is one function for each engine. Engines can start each other, so a process may have variables of several. They
are checked from the innermost engine to the outermost::

    torchrun, paceline run    RANK, WORLD_SIZE              the innermost: set for this process alone
    Open MPI                  OMPI_COMM_WORLD_RANK, ...     mpiexec starts its daemons by srun in an allocation
    MPICH, Intel MPI          PMI_RANK, MPI_LOCALRANKID     the same
    Slurm                     SLURM_STEP_ID, SLURM_PROCID   srun; a batch script has a SLURM_PROCID, but no step
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from paceline.environments.start import LOOPBACK, Identity, Start, number, read_identity
from paceline.errors import ConfigError

_LOWEST_PORT, _PORTS = 10_000, 20_000  # port range below the system's ephemeral ports


def slurm_step(environment: Mapping[str, str]) -> Start | None:
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    if not {"SLURM_STEP_ID", "SLURM_JOB_ID", *names} <= environment.keys():
        return None
    tasks = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = number(environment, "SLURM_NODEID", 0)
    who = read_identity(environment, *names, local_world_size=tasks[node] if 0 <= node < len(tasks) else None)
    host = first_host(environment.get("SLURM_STEP_NODELIST", "")) if len(tasks) > 1 else LOOPBACK
    job, step = (number(environment, f"SLURM_{name}_ID", 0) for name in ("JOB", "STEP"))
    cores = number(environment, "SLURM_CPUS_ON_NODE", 0) or None
    return Start("Slurm", who, host or None, _LOWEST_PORT + (101 * job + step) % _PORTS, cores=cores)


def tasks_per_node(text: str) -> list[int]:
    """Parse Slurm's list of tasks per node: ``3,1(x2)`` is ``[3, 1, 1]``."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        if (found := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())) is None:
            raise ConfigError(f"{text!r} in the environment does not say how many tasks are on each node of Slurm.")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm host list: ``a`` of ``a,b``, ``h08-ib`` of ``h[08-10,12]-ib,gpu1``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None  # the pattern also matches an empty string
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def open_mpi(environment: Mapping[str, str]) -> Start | None:
    """Return the start by Open MPI 4 or 5, or None. With ``--with-ft ulfm`` processes survive each other's loss."""
    rank, size, local_rank, local_size = (
        f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    if not {rank, size} <= environment.keys():
        return None
    parts = [environment.get(name, "") for name in ("PMIX_NAMESPACE", "PMIX_SERVER_URI2", "PMIX_SERVER_TMPDIR")]
    who = read_identity(environment, rank, size, local_rank, local_size)
    survives = environment.get("OMPI_MCA_mpi_ft_enable") in ("1", "true")
    return replace(_of_mpi("Open MPI", who, " ".join(filter(None, parts))), survives=survives)


def hydra(environment: Mapping[str, str]) -> Start | None:
    """Return the start by Hydra (MPICH, Intel MPI), or None. srun sets PMI variables too, but not the local ones."""
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if "PMI_ID" in environment and names[0] not in environment and "MPI_LOCALRANKID" in environment:
        raise ConfigError(
            "mpiexec with -pmi-port does not say how many workers there are: leave -pmi-port out, or set RANK and "
            "WORLD_SIZE of each process."
        )
    if not {*names} <= environment.keys():
        return None
    engine = "Intel MPI" if any(name.startswith("I_MPI_") for name in environment) else "MPICH"
    manager = number(environment, "PMI_FD", -1) if "PMI_FD" in environment else None
    return _of_mpi(engine, read_identity(environment, *names), environment.get("PMI_PORT", ""), manager)


def _of_mpi(engine: str, who: Identity, job: str, manager: int | None = None) -> Start:
    return Start(engine, who, LOOPBACK if who.local_world_size == who.world_size else None, None, job, manager)


def find_start(environment: Mapping[str, str]) -> Start:
    """Return how this process was started. Without an engine, it is the only worker.

    ``MASTER_ADDR`` and ``MASTER_PORT`` override the rendezvous address of any engine.

    Raises:
        ConfigError: a variable has an invalid value.
    """
    found = next((start for engine in _ENGINES if (start := engine(environment)) is not None), None)
    found = found or Start("", _of_torchrun(environment))
    port = number(environment, "MASTER_PORT", 0) if environment.get("MASTER_PORT") else found.port
    return replace(found, host=environment.get("MASTER_ADDR") or found.host, port=port)


def torchrun(environment: Mapping[str, str]) -> Start | None:
    """Return the start by torchrun, or by a launcher that sets torchrun's variables. None without ``RANK``."""
    return Start("torchrun", _of_torchrun(environment)) if "RANK" in environment else None


def _of_torchrun(environment: Mapping[str, str]) -> Identity:
    return read_identity(environment, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


_ENGINES: tuple[Callable[[Mapping[str, str]], Start | None], ...] = (torchrun, open_mpi, hydra, slurm_step)
