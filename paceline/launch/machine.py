"""This machine: its cores, its memory domains, a free port."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from paceline.errors import StartError
from paceline.launch.base import Machine

_NODES = Path("/sys/devices/system/node")


def look() -> Machine:
    """The cores this process may use, grouped by memory domain."""
    cores = _usable_cores()
    domains = [_core_list(path.read_text()) & cores for path in sorted(_NODES.glob("node[0-9]*/cpulist"))]
    return Machine(cores, tuple(domain for domain in domains if domain))


def _usable_cores() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _core_list(text: str) -> frozenset[int]:
    """``0-3,8`` as a set."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def choose_port(wanted: int | None) -> int:
    """The wanted port if nobody listens on it; without a wish, a free one.

    Another program can take the port before the workers do. That is rare, and a worker then says so.

    Raises:
        StartError: the wanted port is in use.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", wanted or 0))
        except OSError as error:
            raise StartError(
                f"--port {wanted} cannot be used: {error.strerror}. Choose another, or leave --port out for a free one."
            ) from None
        return int(probe.getsockname()[1])
