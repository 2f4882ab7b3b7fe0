"""MPI communicators for torch's process groups."""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

from paceline.comm.mpi.library import initialized, survives
from paceline.errors import StartError

_POLL_SECONDS = 0.02


def of_ranks(ranks: Sequence[int]) -> Any:
    """Create the communicator of these MPI ranks, which alone call this function, or of all ranks if none are given."""
    world = initialized().COMM_WORLD
    return world.Create_group(world.Get_group().Incl([*ranks])) if ranks else world.Dup()


def at_store(store: Any, rank: int, size: int, seconds: float) -> Any:
    """Create the communicator of the workers that meet at a store.

    Raises:
        RuntimeError: a worker was lost, the store was closed, or the timeout expired.
    """
    mpi = initialized()
    own, world_size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    store.set(f"mpi/{rank}", f"{own} {secrets.token_hex(8)}")
    told = [one.decode().split() for one in store.multi_get([f"mpi/{one}" for one in range(size)])]
    ranks = [int(of_mpi) for of_mpi, _ in told]  # after a loss, MPI ranks differ from the ranks of the group
    if len({*ranks}) < size:
        raise StartError(
            f"This is rank {rank} of {size}, but rank {own} of {world_size} for MPI "
            f"({mpi.Get_library_version().splitlines()[0]}). Start the script with the mpiexec of that MPI, and with "
            f"no other ranks in the environment."
        )
    return _of_survivors(ranks, told[0][1], store, seconds) if survives() else of_ranks(ranks)


def _of_survivors(ranks: Sequence[int], tag: str, store: Any, seconds: float) -> Any:
    """Create a communicator without lost ranks, in a thread, because MPI would wait forever after a further loss."""
    mpi = initialized()
    group = mpi.COMM_WORLD.Get_group().Incl([*ranks])
    made: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def make() -> None:
        try:
            made.put(mpi.Intracomm.Create_from_group(group, tag, mpi.INFO_NULL, mpi.ERRORS_RETURN))
        except mpi.Exception as error:
            made.put(error)

    threading.Thread(target=make, name="paceline-mpi-group", daemon=True).start()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):
            if isinstance(comm := made.get(timeout=_POLL_SECONDS), Exception):
                raise comm
            return comm
        store.check(["mpi/0"])
    raise RuntimeError(f"Timed out waiting {seconds:g} s for a communicator of MPI")
