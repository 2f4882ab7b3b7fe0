"""Where rank 0 listens, whatever has started the workers."""

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

_GRACE_SECONDS = 1.0
"""For torch to notice by itself that the time is up."""
_COMMAND_SECONDS = 30.0
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Address:
    """Where rank 0 listens; on rank 0 with the socket, if it is open already."""

    host: str
    port: int
    listener: socket.socket | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@contextlib.contextmanager
def find_address(start: Start, seconds: float) -> Iterator[Address]:
    """Find where rank 0 listens; until the end of the context rank 0 says so to who asks.

    Raises:
        ConfigError: nothing says where.
        StartError: rank 0 did not say it.
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
    """Listen at an address alone; torch would at all that the machine has.

    At all if the name stands for none by which others reach this machine, but for a service, or for loopback, as in
    the file of hosts of many systems.
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
    """Call what might never return, as torch waits without end for a program that listens, but does not answer.

    Raises:
        ValueError: it has not returned; with the text for this case.
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
    """What processes of this start on this machine have, and no others."""
    manager = None if start.job or start.manager is None else peer_process(start.manager)
    return start.job or (f"process {manager}" if manager else "")


@contextlib.contextmanager
def _told_here(start: Start, job: str, seconds: float) -> Iterator[Address]:
    """Let rank 0 choose a port of loopback, and say it to the others."""
    rank = start.identity.rank
    if rank == 0:
        listener = listen(LOOPBACK, 0)
        try:
            server = PortServer(job, listener.getsockname()[1])
        except OSError as error:
            listener.close()
            raise StartError(
                f"Rank 0 cannot say its port to the other ranks of {start.engine}: {error}. Another process has taken "
                f"this job's name; set MASTER_ADDR and MASTER_PORT."
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
            f"Rank {rank} waited {seconds:.0f} s for rank 0 of {start.identity.world_size} to say where it listens. "
            f"See its output; does every process that {start.engine} starts call paceline.start?"
        )
    yield Address(LOOPBACK, port)


def exchange_by_mpi(start: Start, seconds: float) -> Address:
    """Let rank 0 choose where it listens, and say it to the others by MPI.

    Args:
        start: how mpiexec has started this process.
        seconds: to wait for the others.

    Raises:
        StartError: they did not come, or mpi4py is missing.
    """
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
    """The address of a node of Slurm, if its name is known to Slurm alone."""
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
