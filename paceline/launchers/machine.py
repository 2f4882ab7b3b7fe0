"""Resources of this machine: cores, memory domains, free ports, and process limits."""

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
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")  # first and last port of the ephemeral range
_LOWEST_PORT, _DRAWS = 10_000, 100
_MOST_MARKS = 32
_marks: deque[int] = deque()
"""Descriptors of the sockets whose names mark the last ports that this process has drawn, until it ends."""
_FILES, _THREADS = 64, 12
"""Files and threads of a worker or launcher without connections. Measured: 17 to 25 files, 7 to 10 threads."""
_FILES_OF_CHILD, _THREADS_OF_CHILD = 5, 2
"""Launcher's files and threads per local worker: log, two pipes, process handle, connection; two reader threads."""


@dataclass(frozen=True)
class Allowed:
    """Process limits of the system. None means unlimited."""

    files: int | None = None  # soft limit of open files per process
    most_files: int | None = None  # hard limit of open files, up to which a process may raise its soft limit
    processes: int | None = None  # limit of processes per user, threads included


def allowed() -> Allowed:
    """Return the limits of this process, which its workers inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0] if os.geteuid() else resource.RLIM_INFINITY
    given = (None if one == resource.RLIM_INFINITY else one for one in (soft, hard, processes))
    return Allowed(*given)


def files_needed(here: int, largest: int) -> int:
    """Return the maximum number of open files that a worker or the launcher needs.

    A worker has a connection to every other worker (gloo's full mesh). During a change of generation it also has two
    files for each worker of its machine.
    """
    return _FILES + largest + max(2 * here, _FILES_OF_CHILD * here)


def processes_needed(here: int) -> int:
    """Return the number of processes and threads of this machine's workers and launcher, without data loaders."""
    return _THREADS + here * (_THREADS + _THREADS_OF_CHILD)


def check_allowed(here: int, largest: int, given: Allowed | None = None) -> None:
    """Raise StartError if the system's limits are too low for this many workers.

    Args:
        largest: maximum number of workers in the run.
        given: limits to check against. Defaults to the limits of this process.
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


def measure() -> Machine:
    """Return the cores that this process may use, grouped by memory domain."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return Machine(frozenset(cores), tuple(domains(frozenset(cores)).values()))


def domains(cores: frozenset[int]) -> dict[int, frozenset[int]]:
    """Return those of the given cores that belong to each memory domain, by its number, without empty domains."""
    paths = sorted(_NODES.glob("node[0-9]*/cpulist"))
    found = {int(path.parent.name.removeprefix("node")): core_list(path.read_text()) & cores for path in paths}
    return {number: own for number, own in found.items() if own}


def core_list(text: str) -> frozenset[int]:
    """Parse a list of cores such as ``0-3,8``."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def choose_port(wanted: int | None) -> int:
    """Return the wanted port if no process listens on it, or a free port if `wanted` is None.

    The workers bind the port seconds later. Therefore a free port is drawn below the ephemeral range, which serves
    outgoing connections, and from ports that no other process has drawn this way and still holds. Another program can
    still take it on purpose. A worker then reports the conflict.
    """
    if wanted is None:
        below, chance = number_in(_GIVEN_PORTS) or 0, SystemRandom()  # tests may have seeded the default generator
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
    try:
        choose_port(port)
    except StartError:
        return True
    return False


def _draw(port: int) -> int:
    """Check that a port is free, and mark it as drawn by a socket name in this network namespace."""
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


def number_in(file: Path, place: int = 0) -> int | None:
    """Return the word at this place in a file of the kernel as a number, or None if it is missing or no number."""
    try:
        return int(file.read_text().split()[place])
    except (OSError, ValueError, IndexError):
        return None
