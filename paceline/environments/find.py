"""Detection of the engine that started this process, from environment variables.

There is one function for each engine. Engines can start each other, so a process may have variables of several. They
are checked from the innermost engine to the outermost::

    torchrun, paceline run    RANK, WORLD_SIZE              the innermost: set for this process alone
    Open MPI                  OMPI_COMM_WORLD_RANK, ...     mpiexec starts its daemons by srun in an allocation
    MPICH, Intel MPI          PMI_RANK, MPI_LOCALRANKID     the same
    Slurm                     SLURM_STEP_ID, SLURM_PROCID   srun; a batch script has a SLURM_PROCID, but no step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from paceline.environments.mpi import hydra, open_mpi
from paceline.environments.slurm import slurm_step
from paceline.environments.start import Identity, Start, number, read_identity


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
