"""The plain data of membership, shared by the coordinator and the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.system.secret import Secret

Message = dict[str, Any]
"""What goes over a connection to the coordinator: a JSON object."""
LONGEST_TEXT = 1 << 20
"""Characters of a text in a message."""


@dataclass(frozen=True)
class RunInfo:
    """What the launchers of one run have in common.

    Attributes:
        id: tells this run from all others; no secret.
        secret: known to all its launchers.
        script: the name of the script's file.
        name: of the run.
        resume: the checkpoint to start from.
        differences: says in a line each how a machine that joins, of this name, is unlike that of the coordinator.
    """

    id: str
    secret: Secret
    script: str
    name: str
    resume: str | None = None
    differences: Callable[[str, Message], list[str]] = lambda *_: []

    def difference(self, script: str, name: str | None) -> str:
        """Say why a launcher with this script, and this name if it was given one, starts another run; else empty."""
        if script != self.script:
            return f"it is the run {self.name} of {self.script}, not one of {script}"
        return f"it is the run {self.name}, not {name}" if name not in (None, self.name) else ""


@dataclass(frozen=True)
class Bounds:
    """How many workers there must be, may be, and are wanted now.

    Attributes:
        least: training waits below this number.
        most: no more are admitted.
        wanted: lost workers are replaced up to this number.
        replaces: whether lost workers are started anew.
        patience: seconds to wait for replacements below ``least``.
        drops: whether late workers are dropped.
    """

    least: int
    most: int
    wanted: int
    replaces: bool = False
    patience: float = 600.0
    drops: bool = False

    def shortage(self, there: int, fits: Sequence[int]) -> str:
        """Say why that many workers cannot go on; ``fits`` as in :class:`Worker`."""
        if there >= self.least and fits and there not in fits:
            counts = [str(count) for count in fits if self.least <= count <= self.most]
            return f"these settings are for {' or '.join(counts)} workers, and {there} are left"
        return f"{there} of at least {self.least} workers are left"


@dataclass(frozen=True)
class Lost:
    """A worker that was lost.

    Attributes:
        worker: the number of the process.
        rank: its rank; None if it was no member.
        reason: who, and what happened.
        may_run: whether its process may still run.
    """

    worker: int
    rank: int | None
    reason: str
    may_run: bool = False


@dataclass
class Worker:
    """What the coordinator knows of one worker process.

    Attributes:
        number: of the process.
        state: ``starting``, ``ready`` (waits for the next generation), ``training``, or ``gone``.
        progress: the steps and evaluations whose result it holds, and what distinguishes its state from that of equally
            far workers (``recovery.Progress``); None before it has a state.
        session: how often its script has called ``paceline.start``; all members are in the same session.
        ready_since: when it reported that it waits for the next generation.
        leaving: it was asked to end.
        ending: its script has ended; how, its agent will say.
        finished: its process has ended with exit code 0.
        refused: it does not match the others.
        joined: it has been a member.
        end_sent: the end of the run was sent to it.
        knows: the last generation whose members were sent to it.
        about: its host, process and address.
        facts: what all workers must agree on.
        fits: how many workers can train together with its settings; empty: any number.
    """

    number: int
    state: str = "starting"
    progress: tuple[int, ...] | None = None
    session: int = 1
    ready_since: float = 0.0
    leaving: bool = False
    ending: bool = False
    finished: bool = False
    refused: bool = False
    joined: bool = False
    end_sent: bool = False
    knows: int = -1
    about: dict[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    fits: Sequence[int] = ()


@dataclass(frozen=True)
class Member:
    """One worker of a membership: how to reach it, and its shared memory if all are on one machine."""

    worker: int
    host: str
    pid: int
    address: str
    arena: tuple[int, str] | None = None


def neighbours(members: Sequence[Member], rank: int) -> list[int]:
    """The ranks of the workers on the machine of one of them."""
    machines = [(one.host, one.address) for one in members]
    return [other for other, machine in enumerate(machines) if machine == machines[rank]]


@dataclass(frozen=True)
class Membership:
    """The workers of one generation, by rank.

    Attributes:
        generation: how often the workers have changed.
        members: by rank.
        joined: the numbers of the workers that were not in the generation before.
        lost: the numbers of those that were, and no longer are.
        fenced: whether a dropped one may still run.
        fresh: whether none of them has a state yet.
    """

    generation: int
    members: tuple[Member, ...]
    joined: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    fenced: bool = False
    fresh: bool = False

    def rank_of(self, worker: int) -> int:
        """Return the rank of a worker process."""
        return next(rank for rank, member in enumerate(self.members) if member.worker == worker)


@dataclass(frozen=True)
class Departure:
    """How a worker leaves the run: its exit code, why, and whether it saves a checkpoint for all first."""

    code: int
    reason: str
    save: bool = False


def largest_fit(fits: Sequence[int], count: int) -> int:
    """The largest number up to ``count`` that can train together; 0 if there is none."""
    return max((fit for fit in fits if fit <= count), default=0) if fits else count


def by_machine(numbers: Sequence[int], workers: Mapping[int, Worker]) -> list[int]:
    """Put workers of the same machine next to each other, machines in the order of their first worker.

    Neighbours compute neighbouring microbatches, so the workers of a machine have few whole nodes of the canonical
    tree together.
    """
    machines = {number: (workers[number].about.get("host"), workers[number].about.get("address")) for number in numbers}
    order = list(dict.fromkeys(machines.values()))
    return sorted(numbers, key=lambda number: order.index(machines[number]))


def saver_of(members: Sequence[int], workers: Mapping[int, Worker]) -> int | None:
    """Choose who writes the last checkpoint: the first of the most advanced workers that are ready."""
    ranks = {number: rank for rank, number in enumerate(members)}
    holders = [one for one in workers.values() if one.state == "ready" and one.progress is not None]
    holders.sort(key=lambda one: ranks.get(one.number, len(ranks)))
    if not holders:
        return None
    most = max(one.progress for one in holders if one.progress is not None)
    return next(one.number for one in holders if one.progress == most)
