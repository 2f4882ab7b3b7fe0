"""Data classes for the start of a process by an engine, and functions to read its identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import ConfigError

MOST_WORKERS = 65_536  # maximum number of workers of a run, on all machines together
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Identity:
    """Rank of this process and number of workers, globally and on its machine, and restart generation."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    generation: int = 0


@dataclass(frozen=True)
class Start:
    """Start of this process by an engine."""

    engine: str  # name of the engine. Empty if there is none.
    identity: Identity  # rank and world size of this process
    host: str | None = None  # host on which rank 0 listens. None if only rank 0 knows it.
    port: int | None = None  # port on which rank 0 listens. None if only rank 0 knows it.
    job: str = ""  # text that exactly the processes of this start on this machine share. Empty if the engine has none.
    # descriptor of the connection to the engine's process on this machine, which the same processes share
    manager: int | None = None
    # number of cores of this machine that the start may use. None if the engine does not provide it.
    cores: int | None = None
    survives: bool = False  # whether the engine keeps the other processes running after the loss of one


def threads_of(own: int, machine: int, workers: int) -> int:
    """Return the number of threads of a worker.

    Args:
        own: number of cores on which the worker may run: all cores of the start, or fewer if the worker is bound.

    Example:
        >>> threads_of(own=8, machine=8, workers=4), threads_of(own=2, machine=8, workers=4)
        (2, 2)
    """
    return max(1, min(own, max(own, machine) // workers))


def number(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return the value of an integer variable, or `default` if unset. Raise ConfigError if it is not an integer."""
    try:
        return int(environment.get(name, default))
    except ValueError:
        raise ConfigError(f"{name}={environment[name]!r} in the environment is not a whole number.") from None


def read_identity(
    environment: Mapping[str, str],
    rank: str,
    world_size: str,
    local_rank: str = "",
    local_size: str = "",
    local_world_size: int | None = None,
) -> Identity:
    """Read and check an identity from the variables with these names."""
    size, own = number(environment, world_size, 1), number(environment, rank, 0)
    if size > MOST_WORKERS:
        raise ConfigError(f"{world_size}={size} in the environment: a run has at most {MOST_WORKERS} workers.")
    if not 0 <= own < size:
        raise ConfigError(f"rank {own} is not below the world size {size}; check {rank} and {world_size}.")
    return Identity(
        rank=own,
        world_size=size,
        local_rank=number(environment, local_rank, 0),
        local_world_size=number(environment, local_size, size) if local_world_size is None else local_world_size,
        generation=number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
    )
