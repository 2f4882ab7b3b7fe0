"""Environment variables of mpiexec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.environments.start import LOOPBACK, Identity, Start, number, read_identity
from paceline.errors import ConfigError


def open_mpi(environment: Mapping[str, str]) -> Start | None:
    """Return the start by Open MPI 4 or 5, or None. With ``--with-ft ulfm`` processes survive the loss of another."""
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
            "WORLD_SIZE of each."
        )
    if not {*names} <= environment.keys():
        return None
    engine = "Intel MPI" if any(name.startswith("I_MPI_") for name in environment) else "MPICH"
    manager = number(environment, "PMI_FD", -1) if "PMI_FD" in environment else None
    return _of_mpi(engine, read_identity(environment, *names), environment.get("PMI_PORT", ""), manager)


def _of_mpi(engine: str, who: Identity, job: str, manager: int | None = None) -> Start:
    return Start(engine, who, LOOPBACK if who.local_world_size == who.world_size else None, None, job, manager)
