"""This machine: its cores, its memory domains, a free port; and whether it allows so many workers."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

from paceline.errors import StartError
from paceline.launchers.base import Machine

_NODES = Path("/sys/devices/system/node")
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT, _DRAWS = 10_000, 100
_MOST_MARKS = 32
_marks: deque[int] = deque()
"""Descriptors of the sockets whose names say which ports this process has drawn."""
_FILES, _THREADS = 64, 12
"""Of a worker or a launcher, besides those for the others; measured: 17 to 25 files, and 7 to 10 threads."""
_FILES_OF_CHILD, _THREADS_OF_CHILD = 5, 2
"""In the launcher for each worker of its machine: a log, two pipes, a process handle, a connection; and two readers."""


@dataclass(frozen=True)
class Allowed:
    """What the system allows a process; None: any number.

    Attributes:
        files: that it has open.
        most_files: up to which it may raise that by itself.
        processes: of the user, threads included.
    """

    files: int | None = None
    most_files: int | None = None
    processes: int | None = None


def allowed() -> Allowed:
    """Read what the system allows this process, and so the workers that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0] if os.geteuid() else resource.RLIM_INFINITY
    given = (None if one == resource.RLIM_INFINITY else one for one in (soft, hard, processes))
    return Allowed(*given)


def files_needed(here: int, largest: int) -> int:
    """How many open files a worker or the launcher needs at most.

    A worker has a connection to each other one (gloo's full mesh), and while it changes from one generation to the next
    two files for each worker of its machine.

    Args:
        here: workers of this machine.
        largest: workers of the run.
    """
    return _FILES + largest + max(2 * here, _FILES_OF_CHILD * here)


def processes_needed(here: int) -> int:
    """How many processes and threads the workers of this machine and their launcher are, without data loaders."""
    return _THREADS + here * (_THREADS + _THREADS_OF_CHILD)


def check_allowed(here: int, largest: int, given: Allowed | None = None) -> None:
    """Refuse to start more workers than the system allows.

    Args:
        here: workers of this machine.
        largest: workers of the run.
        given: what is allowed; None: to this process.

    Raises:
        StartError: they need more open files, or are more processes.
    """
    given = given or allowed()
    files, processes = files_needed(here, largest), processes_needed(here)
    if given.files is not None and given.files < files:
        cure = f"Run `ulimit -n {files}` before the start"
        if given.most_files is not None and given.most_files < files:
            cure += (
                f", which needs a hard limit above the {given.most_files} of now: nofile in /etc/security/limits.conf, "
                f"LimitNOFILE= of the service, or --ulimit nofile= of the container"
            )
        raise StartError(
            f"{largest} workers, {here} of them on this machine, need {files} open files in a process, for the "
            f"connections of each to all others and for shared memory; the limit is {given.files} (ulimit -n). {cure}."
        )
    if given.processes is not None and given.processes < processes:
        raise StartError(
            f"{here} workers on this machine are about {processes} processes and threads; the limit is "
            f"{given.processes} for all that this user runs (ulimit -u). Run `ulimit -u {2 * processes}` before the "
            f"start, raise nproc in /etc/security/limits.conf, or start fewer workers here."
        )


def look() -> Machine:
    """The cores this process may use, grouped by memory domain."""
    cores = _usable_cores()
    domains = [core_list(path.read_text()) & cores for path in sorted(_NODES.glob("node[0-9]*/cpulist"))]
    return Machine(cores, tuple(domain for domain in domains if domain))


def _usable_cores() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def core_list(text: str) -> frozenset[int]:
    """Read ``0-3,8`` as a set."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def choose_port(wanted: int | None) -> int:
    """The wanted port if nobody listens on it; without a wish, a free one.

    The workers bind it seconds later. So it is drawn from those that the system does not give to whoever asks for any,
    as each connection does, and that no process has drawn like this and still holds; a program that wants this very one
    can still take it, and a worker then says so.

    Raises:
        StartError: the wanted port is in use.
    """
    if wanted is None:
        below, chance = _first_given_port(), SystemRandom()  # tests may have seeded the other one
        for _ in range(_DRAWS if below > 2 * _LOWEST_PORT else 0):
            with contextlib.suppress(OSError):
                return _draw(chance.randrange(_LOWEST_PORT, below))
    try:
        return _bind(wanted or 0)
    except OSError as error:
        raise StartError(
            f"--port {wanted} cannot be used: {error.strerror}. Choose another, or leave --port out for a free one."
        ) from None


def listens(port: int) -> bool:
    """Whether a process of this machine listens there."""
    try:
        choose_port(port)
    except StartError:
        return True
    return False


def _draw(port: int) -> int:
    """Take a port, and mark it as drawn by a name in this network namespace, which ends with this process.

    Raises:
        OSError: it is in use, or marked.
    """
    _bind(port)
    if sys.platform == "linux":
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mark:
            mark.bind(f"\0paceline-port-{port}")
            _marks.append(mark.detach())
        if len(_marks) > _MOST_MARKS:
            os.close(_marks.popleft())
    return port


def _bind(port: int) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))
        return int(probe.getsockname()[1])


def _first_given_port() -> int:
    """The lowest port that the system gives to whoever asks for any; 0 if unknown."""
    try:
        return int(_GIVEN_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
