"""MPI transport: tagged transfers of tensors in host memory, as with gloo, between processes of mpiexec."""

from __future__ import annotations

import torch
import torch.distributed as dist

from paceline.comm.mpi.backend import REGISTERED, abort, register
from paceline.comm.mpi.library import initialized
from paceline.comm.transport.base import Work
from paceline.comm.transport.gloo import Gloo
from paceline.environments import env
from paceline.errors import ConfigError


class Mpi(Gloo):
    """Default process group for tensors on the CPU. Within a machine, MPI uses its own shared memory.

    Raises:
        ConfigError: mpiexec did not start this process.
        StartError: mpi4py is missing, or MPI does not support calls from several threads.
    """

    backend = REGISTERED

    def __init__(self) -> None:
        super().__init__(same_host=False)
        launched = env.launch_info()
        engine = "paceline run" if launched is not None else env.started_by().engine
        if not (launched and launched.ulfm) and engine not in ("Open MPI", "MPICH", "Intel MPI"):
            raise ConfigError(
                f"transport='mpi' needs workers that mpiexec has started, and {engine or 'no launcher'} has started "
                f"these: `mpiexec -n 2 python train.py`."
            )
        initialized()  # before the rendezvous, which would otherwise initialize MPI itself and finalize it
        register()

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        work: Work | None = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        return work

    def abort(self) -> None:
        """Revoke the communicators, so that every wait fails on all workers."""
        abort()
