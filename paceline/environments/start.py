"""How an engine has started a process, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import ConfigError

MOST_WORKERS = 65_536
"""Of a run, on all its machines."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Identity:
    """Who this process is among the workers."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    generation: int = 0


@dataclass(frozen=True)
class Start:
    """How an engine has started this process.

    Attributes:
        engine: its name.
        identity: who this process is.
        host: where rank 0 listens; None if only rank 0 can say.
        port: on which port; None if only rank 0 can say.
        job: a text that all processes of this start on this machine have, and no others; empty if there is none.
        manager: the descriptor of a connection to the engine's process on this machine, of which that is true, too.
        cores: of this machine that all processes of this start have; None if the engine does not say.
        survives: the engine lets the other processes go on when one is lost.
    """

    engine: str
    identity: Identity
    host: str | None = None
    port: int | None = None
    job: str = ""
    manager: int | None = None
    cores: int | None = None
    survives: bool = False


def threads_of(own: int, machine: int, workers: int) -> int:
    """How many threads a worker has.

    Args:
        own: cores on which it may run: those of the machine that the start has, or some of them if it is bound.
        machine: cores that the start has on this machine.
        workers: of the start on this machine.

    Example:
        >>> threads_of(own=8, machine=8, workers=4), threads_of(own=2, machine=8, workers=4)
        (2, 2)
    """
    return max(1, min(own, max(own, machine) // workers))


def number(environment: Mapping[str, str], name: str, default: int) -> int:
    """A variable that must be a whole number."""
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
    """Read it from the variables of these names, and check it."""
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
