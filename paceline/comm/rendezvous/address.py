"""Discovery of rank 0's address for workers started by any launcher."""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from paceline.comm.rendezvous.mpi_exchange import exchange
from paceline.comm.rendezvous.port_exchange import PortServer, ask_port, peer_process
from paceline.environments import env
from paceline.environments.start import LOOPBACK, Start
from paceline.errors import ConfigError, StartError

_GRACE_SECONDS = 1.0  # extra time for torch to raise its own timeout error
_COMMAND_SECONDS = 30.0
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Address:
    """Address of rank 0. On rank 0 it includes the listening socket if that is already open."""

    host: str
    port: int
    listener: socket.socket | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@contextlib.contextmanager
def find_address(start: Start, seconds: float) -> Iterator[Address]:
    """Find the address of rank 0. Within the job, rank 0 answers the port requests of other ranks.

    Raises:
        StartError: rank 0 did not announce its address.
    """
    if start.host is not None and start.port is not None:
        yield Address(_reachable(start.host) if start.engine == "Slurm" else start.host, start.port)
    elif start.host == LOOPBACK and (job := _job(start)):
        with _told_here(start, job, seconds) as address:
            yield address
    elif start.host is None and start.engine in ("Open MPI", "MPICH", "Intel MPI"):
        yield exchange_by_mpi(start, seconds)
    else:
        missing = "MASTER_ADDR" if start.host is None else "MASTER_PORT"
        size = start.identity.world_size
        raise ConfigError(
            f"There are {size} workers, but {missing} is not set: start the script with `paceline run -n {size}` or "
            f"`torchrun`, or set MASTER_ADDR and MASTER_PORT."
        )


def listen(host: str, port: int) -> socket.socket:
    """Listen at the address of ``host`` only, where torch would listen on all interfaces.

    Listens on all interfaces if the name resolves to no address of this machine that others can reach, but to a
    service or, as ``/etc/hosts`` does on many systems, to loopback.
    """
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if env.is_loopback(host) or not env.is_loopback(str(address[0])):
            try:
                return socket.create_server((str(address[0]), port), family=family)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
    return socket.create_server(("", port))


def within(seconds: float, otherwise: str, call: Callable[[], _Found]) -> _Found:
    """Call a function with a timeout, because torch waits forever for a server that accepts but never answers.

    Raises:
        ValueError: the call has not returned in time. The message is ``otherwise``.
    """
    found: list[_Found] = []
    failures: list[Exception] = []

    def calling() -> None:
        try:
            found.append(call())
        except (RuntimeError, ValueError, OSError, StartError) as error:
            failures.append(error)

    thread = threading.Thread(target=calling, daemon=True)
    thread.start()
    thread.join(seconds + _GRACE_SECONDS)
    if failures:
        raise failures[0]
    if not found:
        raise ValueError(otherwise)
    return found[0]


def _job(start: Start) -> str:
    """Return a text that only the processes of this launch on this machine share, or an empty one."""
    manager = None if start.job or start.manager is None else peer_process(start.manager)
    return start.job or (f"process {manager}" if manager else "")


@contextlib.contextmanager
def _told_here(start: Start, job: str, seconds: float) -> Iterator[Address]:
    """Choose a loopback port on rank 0 and announce it to the other ranks of this machine."""
    rank = start.identity.rank
    if rank == 0:
        listener = listen(LOOPBACK, 0)
        try:
            server = PortServer(job, listener.getsockname()[1])
        except OSError as error:
            listener.close()
            raise StartError(
                f"Rank 0 cannot report its port to the other ranks of {start.engine}: {error}. Another process has "
                f"taken this job's name; set MASTER_ADDR and MASTER_PORT."
            ) from None
        with contextlib.closing(server):
            yield Address(LOOPBACK, listener.getsockname()[1], listener)
        return
    try:
        port = ask_port(job, seconds)
    except PermissionError as error:
        raise StartError(f"Rank {rank} does not believe the port that it got: {error}.") from None
    if port is None:
        raise StartError(
            f"Rank {rank} waited {seconds:.0f} s for rank 0 of {start.identity.world_size} to report where it listens. "
            f"See its output; does every process that {start.engine} starts call paceline.start?"
        )
    yield Address(LOOPBACK, port)


def exchange_by_mpi(start: Start, seconds: float) -> Address:
    """Choose an address on rank 0 and announce it to the other ranks over MPI."""
    who = start.identity
    late = (
        f"Rank {who.rank} waited {seconds:.0f} s in MPI for the other {who.world_size - 1} ranks, to learn where rank "
        f"0 listens. See their output; does every process that {start.engine} starts call paceline.start?"
    )
    try:
        host, port, listener = within(
            seconds, late, lambda: exchange(start, lambda host: listen(host, start.port or 0))
        )
    except ValueError as error:
        raise StartError(str(error)) from None
    return Address(host, port, listener)


def _reachable(node: str) -> str:
    """Return the name of a Slurm node, or its address from ``scontrol`` if the name does not resolve."""
    with contextlib.suppress(OSError):
        socket.getaddrinfo(node, None)
        return node
    if shutil.which("scontrol") is None:
        return node
    try:
        ended = subprocess.run(
            ["scontrol", "show", "node", node, "--oneliner"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_COMMAND_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return node
    found = re.search(r"\bNodeAddr=(\S+)", ended.stdout)
    return found[1] if found else node
