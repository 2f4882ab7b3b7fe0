"""Which workers run on which host, as ``horovodrun`` decides it; what its launcher can do and this one cannot."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.launchers.clusters.base import parse_hosts, read_hostfile

INSTEAD = {
    "output-filename": "what workers print is in runs/NAME/output",
    "ssh-port": "set Port in ~/.ssh/config",
    "ssh-identity-file": "set IdentityFile in ~/.ssh/config",
    "mpi": "use `paceline run --horovod --on mpi`",
    "mpi-args": "use `paceline run --horovod --on mpi`",
    "reset-limit": "a run ends after ten losses without a commit in between",
    "blacklist-cooldown-range": "lost workers are replaced on the same machine",
}
"""What there is in the place of an option, by its name on the command line."""
_OPTIONS = {"use_mpi": "mpi", "extra_mpi_args": "mpi-args", "cooldown_range": "blacklist-cooldown-range"}
"""Arguments of functions that are not spelt as the option."""
_HERE = {"localhost", "127.0.0.1", "::1"}


def fill(hosts: str | None, hostfile: str | None, slots: int, workers: int | None) -> tuple[int | None, str | None]:
    """Fill hosts in their order.

    Args:
        hosts: as in ``h1:4,h2:2``.
        hostfile: a file of lines such as ``h1 slots=4``, instead.
        slots: workers of a host without a number.
        workers: how many are wanted; None: as many as the hosts have slots.

    Returns:
        the number of workers, None if nothing says it; and the hosts with the workers of each, None if this machine is
        the only one.

    Raises:
        ConfigError: the hosts cannot be read, or have fewer slots.
    """
    listed = read_hostfile(Path(hostfile), slots) if hostfile else parse_hosts(hosts, slots) if hosts else []
    if not listed:
        return workers, None
    there = sum(count for _, count in listed)
    wanted = left = workers or there
    if wanted > there:
        raise ConfigError(f"-np {wanted}: the hosts have {there} slots. Name more hosts, or more slots of a host.")
    taken: dict[str, int] = {}
    for host, count in listed:
        if left:
            taken[host] = min(count, left)
            left -= taken[host]
    if taken.keys() <= _HERE | {socket.gethostname()}:
        return wanted, None
    return wanted, ",".join(f"{host}:{count}" for host, count in taken.items())


def of_interfaces(names: str) -> dict[str, str]:
    """The variables by which gloo and NCCL use these network interfaces, separated by commas."""
    return {"GLOO_SOCKET_IFNAME": names, "NCCL_SOCKET_IFNAME": names}


def check_counts(function: str, given: Mapping[str, Any]) -> None:
    """Refuse numbers of workers or hosts, if they are given, that are none.

    Raises:
        ConfigError: one is not a whole number from 1 on.
    """
    for name, value in given.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"{function}: {name}={value!r}: give a whole number from 1 on.")


def refuse(function: str, given: Mapping[str, Any]) -> None:
    """Refuse arguments without a counterpart, if they are given.

    Raises:
        ConfigError: one is, and says what to use instead.
    """
    for name, value in given.items():
        if value:
            instead = INSTEAD[_OPTIONS.get(name, name.replace("_", "-"))]
            raise ConfigError(f"{function}: {name}={value!r} has no counterpart here: {instead}.")


def warn_of(function: str, given: Mapping[str, Any]) -> None:
    """Name the arguments without effect, if they are given, to who has called that function."""
    if without := [name for name, value in given.items() if value is not None]:
        warnings.warn(f"{function}: without effect here: {', '.join(without)}.", stacklevel=3)


def renamed(old: str, given: int | None, new: str, value: int | None) -> int | None:
    """The value of an argument that had another name once; the new name wins."""
    if given is not None:
        warnings.warn(f"{old} is deprecated, use {new} instead", DeprecationWarning, stacklevel=3)
    return given if value is None else value
