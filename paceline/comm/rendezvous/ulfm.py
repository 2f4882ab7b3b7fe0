"""Discovery of a coordinator under ``mpiexec --with-ft ulfm``, so that workers continue after a loss.

With ULFM, mpiexec does not end the other processes when a process is lost, and MPI reports the loss as an error. The
coordinator decides which workers continue and from which step, as under ``paceline run``. Rank 0 starts it as a
separate process and sends its address and the secret of the run to the other ranks over MPI.
"""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys

import torch.distributed as dist

from paceline.comm.mpi.library import initialized
from paceline.comm.rendezvous.address import exchange_by_mpi, within
from paceline.comm.rendezvous.ulfm_coordinator import number_of
from paceline.coordinator.wire.authentication import worker
from paceline.environments import env
from paceline.errors import StartError
from paceline.system.secret import Secret

_KEY_BYTES = 32
_coordinators: list[subprocess.Popen[str]] = []
"""Keeps the pipe to each coordinator open until this process ends, which the coordinator notices."""


def find_coordinator(seconds: float) -> env.LaunchInfo | None:
    """Find the coordinator of this worker, and start it on rank 0. Return None if this run cannot survive a loss."""
    start = env.started_by()
    who = start.identity
    if not start.survives or who.world_size == 1 or dist.is_initialized():
        return None
    mpi = initialized()
    mpi.COMM_WORLD.Set_errhandler(mpi.ERRORS_RETURN)
    where = exchange_by_mpi(start, seconds)
    key = bytearray(secrets.token_bytes(_KEY_BYTES))
    late = f"Rank {who.rank} waited {seconds:.0f} s in MPI for rank 0, to learn the key of the run. See its output."
    try:
        within(seconds, late, lambda: mpi.COMM_WORLD.Bcast(key))
    except ValueError as error:
        raise StartError(str(error)) from None
    except RuntimeError as error:  # base class of mpi4py's errors
        raise StartError(f"Rank {who.rank} did not learn the key of the run from rank 0: {error}.") from error
    secret = Secret(bytes(key))
    if where.listener is not None:
        _start(where.listener, secret, who.world_size)
    number = number_of(who.rank)
    key_of_worker = secret.of_run("").key(worker(number))
    env.set_launch_info(str(where), number, key_of_worker, who.world_size)
    return env.launch_info()


def _start(listener: socket.socket, secret: Secret, workers: int) -> None:
    with listener:
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline.comm.rendezvous.ulfm_coordinator"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # mpiexec waits until its processes' outputs are closed
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[listener.fileno()],
            text=True,
        )
        told = {"listener": listener.fileno(), "secret": secret.hand_over(), "workers": workers}
    assert process.stdin is not None
    process.stdin.write(json.dumps(told) + "\n")
    process.stdin.flush()
    _coordinators.append(process)
