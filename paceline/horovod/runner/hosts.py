"""Assignment of workers to hosts as in ``horovodrun``, and options of Horovod that Paceline does not support."""

from __future__ import annotations

import socket
import sys
import warnings
from collections.abc import Collection, Mapping
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
"""Replacements of unsupported options, by their names on the command line."""
_OPTIONS = {"use_mpi": "mpi", "extra_mpi_args": "mpi-args"}  # function arguments whose names differ from the option
_REFUSED = {"ssh_port", "ssh_identity_file", "use_mpi", "mpi_args", "extra_mpi_args"}
_WITHOUT_EFFECT = {
    *("output_filename", "disable_cache", "reset_limit", "cooldown_range", "stdout", "stderr"),
    *("prefix_output_with_timestamp", "ssh_str"),
}
_TRUE_HERE = {"use_gloo", "verbose"}  # arguments that request the usual behavior of Paceline
_HERE = {"localhost", "127.0.0.1", "::1"}


def fill(hosts: str | None, hostfile: str | None, slots: int, workers: int | None) -> tuple[int | None, str | None]:
    """Assign workers to hosts in the given order.

    Args:
        hosts: hosts such as ``h1:4,h2:2``.
        hostfile: file with lines such as ``h1 slots=4``, instead of ``hosts``.
        slots: number of workers on a host that is listed without a number.
        workers: number of workers. Defaults to the number of slots on all hosts.

    Returns:
        the number of workers, or None if neither hosts nor workers are given, and the hosts with the number of workers
        on each, or None if only this machine is used.
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


def worker_variables(start_timeout: int | None, interfaces: str | Collection[str] | None) -> dict[str, str]:
    """Return environment variables for the timeout of ``init``, and for the network interfaces of gloo and NCCL."""
    found = {} if start_timeout is None else {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(start_timeout)}
    if names := interfaces if isinstance(interfaces, str) else ",".join(sorted(interfaces or ())):
        found |= {"GLOO_SOCKET_IFNAME": names, "NCCL_SOCKET_IFNAME": names}
    return found


def check_counts(function: str, given: Mapping[str, Any]) -> None:
    """Check that the given counts, such as numbers of workers, are None or positive integers."""
    for name, value in given.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"{function}: {name}={value!r}: give a whole number from 1 on.")


def check_others(function: str, given: Mapping[str, Any], without: Collection[str] = ()) -> None:
    """Check arguments of Horovod that Paceline does not read, and warn about those without effect.

    Args:
        without: arguments that this function ignores with a warning, although others refuse them.
    """
    ignored = []
    for name, value in given.items():
        if name in _WITHOUT_EFFECT or name in without:
            ignored += [name] if value not in (None, False) else []
        elif name in _REFUSED:
            if value:
                instead = INSTEAD[_OPTIONS.get(name, name.replace("_", "-"))]
                raise ConfigError(f"{function}: {name}={value!r} has no counterpart here: {instead}.")
        elif name not in _TRUE_HERE:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    if ignored:
        warnings.warn(f"{function}: without effect here: {', '.join(ignored)}.", stacklevel=3)


def check_python(function: str, executable: Any, cure: str) -> None:
    """Raise ConfigError if workers are to run a different Python from this process. ``cure`` ends the message."""
    if executable not in (None, sys.executable):
        raise ConfigError(f"{function}: executable={executable!r}: {cure}.")


def renamed(others: dict[str, Any], old: str, new: str, value: int | None) -> int | None:
    """Return an argument's value. A value under its deprecated name is taken out of ``others``, and second in rank."""
    given: int | None = others.pop(old, None)
    if given is not None:
        warnings.warn(f"{old} is deprecated, use {new} instead", DeprecationWarning, stacklevel=3)
    return given if value is None else value
