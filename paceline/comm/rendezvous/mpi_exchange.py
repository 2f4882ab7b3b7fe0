"""Exchange of rank 0's address over MPI, for processes that mpiexec has started on several machines.

MPI is finalized after this exchange unless the script has initialized it. After that only the workers and mpiexec
handle the loss of a process. MPI cannot be initialized twice, so a script that uses MPI imports ``mpi4py.MPI`` first.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

from paceline.comm.mpi.library import load
from paceline.comm.rendezvous.networks import networks, shared_address
from paceline.environments.start import Start
from paceline.errors import StartError

_BYTES = 4096  # size of the message with a machine's list of addresses


def exchange(start: Start, listen: Callable[[str], socket.socket]) -> tuple[str, int, socket.socket | None]:
    """Return host, port and, on rank 0, the open listening socket of rank 0.

    Args:
        start: launch parameters from MPI. Without a host, rank 0 listens at an address that all machines reach.
    """
    engine, size = start.engine, start.identity.world_size
    mpi = _import(engine)
    if mpi.Is_finalized():
        raise StartError(
            "The script has finalized MPI, by which the processes would find rank 0: call paceline.start "
            "before that, or set MASTER_ADDR and MASTER_PORT."
        )
    if ours := not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_FUNNELED)
    try:
        if (seen := mpi.COMM_WORLD.Get_size()) != size:
            raise StartError(
                f"mpi4py finds {seen} of the {size} processes that {engine} started: it is built for "
                f"{mpi.Get_library_version().splitlines()[0]}. Install mpi4py for {engine}, or set MASTER_ADDR and "
                f"MASTER_PORT."
            )
        return _exchange(mpi.COMM_WORLD, start.host, listen)
    finally:
        if ours:
            mpi.Finalize()


def _import(engine: str) -> Any:
    try:
        return load()
    except (ImportError, RuntimeError) as error:  # RuntimeError: the MPI library is missing
        raise StartError(
            f"{engine} has started workers on several machines, and they learn by mpi4py where rank 0 is, which cannot "
            f"be imported: {error}. Install it with `pip install 'paceline[mpi]'`, or set MASTER_ADDR to the machine "
            f"of rank 0 and MASTER_PORT to a free port of it."
        ) from None


def _exchange(
    comm: Any, host: str | None, listen: Callable[[str], socket.socket]
) -> tuple[str, int, socket.socket | None]:
    mine = json.dumps(networks()).encode()[:_BYTES].ljust(_BYTES)
    theirs = bytearray(_BYTES * comm.Get_size())
    comm.Allgather(mine, theirs)
    ranks = [json.loads(theirs[start : start + _BYTES]) for start in range(0, len(theirs), _BYTES)]
    address, listener, failure = host or shared_address(ranks), None, ""
    port = bytearray(2)
    if comm.Get_rank() == 0 and address is not None:
        try:
            listener = listen(address)
            port = bytearray(listener.getsockname()[1].to_bytes(2))
        except OSError as error:
            failure = f": {error}"
    comm.Bcast(port)  # port 0 after a failure, so that no rank waits forever
    if address is None or not any(port):
        raise StartError(
            f"Rank 0 can listen at no address that all machines reach{failure}. Rank 0 has "
            f"{', '.join(ranks[0]) or 'none but loopback'}. Set MASTER_ADDR and MASTER_PORT."
        )
    return address, int.from_bytes(port), listener
