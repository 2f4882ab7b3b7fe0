"""This machine: its cores, its memory domains, a free port."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from random import SystemRandom

from paceline.errors import StartError
from paceline.launchers.base import Machine

_NODES = Path("/sys/devices/system/node")
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT, _DRAWS = 10_000, 100


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
    as each connection does; a program that wants this very one can still take it, and a worker then says so.

    Raises:
        StartError: the wanted port is in use.
    """
    if wanted is None:
        below, chance = _first_given_port(), SystemRandom()  # tests may have seeded the other one
        for _ in range(_DRAWS if below > 2 * _LOWEST_PORT else 0):
            with contextlib.suppress(OSError):
                return _bind(chance.randrange(_LOWEST_PORT, below))
    try:
        return _bind(wanted or 0)
    except OSError as error:
        raise StartError(
            f"--port {wanted} cannot be used: {error.strerror}. Choose another, or leave --port out for a free one."
        ) from None


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
