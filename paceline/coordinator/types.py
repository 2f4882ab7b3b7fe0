"""The plain data of membership, shared by the coordinator and the workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""What goes over a connection to the coordinator: a JSON object."""


@dataclass(frozen=True)
class Bounds:
    """How many workers there must be, may be, and are wanted now.

    Attributes:
        least: below this number training waits.
        most: more are not taken.
        wanted: lost workers are replaced up to this number.
        replaces: whether workers that were lost are started anew.
        patience: seconds to wait for replacements below the least number.
        drops: whether those that are late are dropped.
    """

    least: int
    most: int
    wanted: int
    replaces: bool = False
    patience: float = 600.0
    drops: bool = False


@dataclass(frozen=True)
class Lost:
    """Who was lost, and how.

    Attributes:
        worker: the number of the process.
        rank: what it was in the view; none if it was not in it.
        what: in words: who, and what happened.
        runs: whether its process may still run.
    """

    worker: int
    rank: int | None
    what: str
    runs: bool = False


@dataclass
class Worker:
    """What the roster knows of one worker process.

    ``state`` is ``starting``, ``ready`` (waits for the next view), ``training``, or ``gone``.
    ``progress`` are the steps and evaluations whose result it holds, and what sets it apart from those with another
    state (``recovery.Standing``); none before it has a state. ``session`` counts how
    often its script has called ``paceline.start``: workers of one view are in the same session. ``joined``: it has been
    in a view. ``fits``: how many workers can train together with its settings; empty: any number.
    """

    number: int
    state: str = "starting"
    progress: tuple[int, ...] | None = None
    session: int = 1
    leaving: bool = False
    finished: bool = False
    refused: bool = False
    joined: bool = False
    told: bool = False
    about: dict[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    fits: Sequence[int] = ()


@dataclass(frozen=True)
class Member:
    """One worker of a membership: how to reach it, its progress, and its shared memory."""

    worker: int
    host: str
    pid: int
    address: str
    port: int
    progress: tuple[int, ...] | None
    arena: tuple[int, str] | None


@dataclass(frozen=True)
class Membership:
    """The workers of one generation, by rank; ``fenced`` if a dropped one may still run."""

    generation: int
    members: tuple[Member, ...]
    joined: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    fenced: bool = False

    def rank_of(self, worker: int) -> int:
        """Return the rank of a worker process."""
        return next(rank for rank, member in enumerate(self.members) if member.worker == worker)


@dataclass(frozen=True)
class Departure:
    """How a worker leaves the run: its exit code, why, and whether it saves a checkpoint for all first."""

    code: int
    reason: str
    save: bool = False
