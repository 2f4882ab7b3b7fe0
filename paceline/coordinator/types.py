"""Plain data of the membership, shared by the coordinator and the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.system.secret import Secret

Message = dict[str, Any]  # message on a connection to the coordinator: a JSON object
LONGEST_TEXT = 1 << 20  # largest number of characters of a text in a message


@dataclass(frozen=True)
class RunInfo:
    """Properties that all launchers of a run share."""

    id: str  # unique identifier of the run; not secret
    secret: Secret
    script: str  # file name of the script
    name: str
    resume: str | None = None  # checkpoint to start from, if any
    # function that describes, in one line each, how a joining machine differs from the coordinator's
    differences: Callable[[str, Message], list[str]] = lambda *_: []

    def difference(self, script: str, name: str | None) -> str:
        """Return why a launcher with this script and optional name belongs to another run; empty if it does not."""
        if script != self.script:
            return f"it is the run {self.name} of {self.script}, not one of {script}"
        return f"it is the run {self.name}, not {name}" if name not in (None, self.name) else ""


@dataclass(frozen=True)
class Bounds:
    """Bounds on the number of workers."""

    least: int  # smallest number of workers to train with
    most: int  # largest number of workers to admit
    wanted: int  # number of workers wanted now. Lost workers are replaced up to this number.
    replaces: bool = False  # whether more machines may join, so that a shortage of workers is waited out
    patience: float = 600.0  # time to wait for workers if there are fewer than ``least``, in seconds
    drops: bool = False  # whether late workers are dropped

    def shortage(self, there: int, fits: Sequence[int]) -> str:
        """Describe why training cannot continue with ``there`` workers; ``fits`` as in :class:`Worker`."""
        if there >= self.least and fits and there not in fits:
            counts = [str(count) for count in fits if self.least <= count <= self.most]
            return f"these settings are for {' or '.join(counts)} workers, and {there} are left"
        return f"{there} of at least {self.least} workers are left"


@dataclass(frozen=True)
class Lost:
    """Lost worker."""

    worker: int  # number of the worker process
    rank: int | None  # rank of the worker; None if it was not a member
    reason: str  # sentence that names the worker and what happened
    may_run: bool = False  # whether the process may still run


@dataclass
class Worker:
    """Coordinator's record of a worker process."""

    number: int  # number of the worker process
    state: str = "starting"  # ``starting``, ``ready`` (waits for the next generation), ``training``, or ``gone``
    # sort key of its progress (``training.progress.Progress.key``): steps, calls, and tie-break. None before it has a
    # training state.
    progress: tuple[int, ...] | None = None
    session: int = 1  # number of ``paceline.start`` calls of its script. All members are in the same session.
    ready_since: float = 0.0  # time at which it reported ready
    leaving: bool = False  # whether it was asked to leave
    ending: bool = False  # whether its script has ended. Its agent will report the exit code.
    finished: bool = False  # whether its process has ended with exit code 0
    refused: bool = False  # whether it was refused because its facts differ
    joined: bool = False  # whether it has ever been a member
    unfit: bool = False  # whether it has reported that it cannot take part, since it joined
    end_sent: bool = False  # whether the end of the run was sent to it
    knows: int = -1  # last generation whose members were sent to it
    about: dict[str, Any] = field(default_factory=dict)  # host, process and address
    facts: Mapping[str, Any] = field(default_factory=dict)  # facts on which all workers must agree
    fits: Sequence[int] = ()  # numbers of workers that its settings support; empty for any number


@dataclass(frozen=True)
class Member:
    """Member of a generation: how to reach it, and its shared-memory handle if all workers are on one machine."""

    worker: int
    host: str
    pid: int
    address: str
    arena: tuple[int, str] | None = None


@dataclass(frozen=True)
class Membership:
    """Workers of a generation, and the rank of this worker among them. A change replaces the whole."""

    rank: int = 0  # rank of this worker
    size: int = 1  # number of workers
    generation: int = 0  # number of membership changes
    hosts: tuple[tuple[int, ...], ...] = ((0,),)  # ranks of the workers on each machine, after the rendezvous
    workers: tuple[int, ...] = ()  # numbers of the worker processes by rank. Empty without a coordinator.

    @property
    def near(self) -> tuple[int, ...]:
        """Ranks of all workers on this machine, including this one."""
        return next(ranks for ranks in self.hosts if self.rank in ranks)

    @property
    def local_rank(self) -> int:
        """Index of this worker among those of its machine."""
        return self.near.index(self.rank)

    def alone(self) -> Membership:
        """Return a membership of this worker alone, because the others are gone or about to end."""
        return Membership(generation=self.generation)


@dataclass(frozen=True)
class Generation:
    """Workers between two membership changes."""

    number: int  # number of membership changes before
    members: tuple[Member, ...]  # members by rank
    joined: tuple[int, ...] = ()  # numbers of the workers that were not in the previous generation
    lost: tuple[int, ...] = ()  # numbers of the workers that were in the previous generation only
    fenced: bool = False  # whether a dropped worker may still run
    fresh: bool = False  # whether no member has a training state yet

    def membership_of(self, worker: int) -> Membership:
        workers = tuple(member.worker for member in self.members)
        hosts: dict[tuple[str, str], list[int]] = {}
        for rank, member in enumerate(self.members):
            hosts.setdefault((member.host, member.address), []).append(rank)
        return Membership(workers.index(worker), len(workers), self.number, tuple(map(tuple, hosts.values())), workers)


@dataclass(frozen=True)
class Departure:
    """Departure of a worker from the run: exit code, reason, and whether it writes the final checkpoint first."""

    code: int
    reason: str
    save: bool = False


def largest_fit(fits: Sequence[int], count: int) -> int:
    """Return the largest supported number of workers up to ``count``, or 0 if there is none."""
    return max((fit for fit in fits if fit <= count), default=0) if fits else count


def by_machine(numbers: Sequence[int], workers: Mapping[int, Worker]) -> list[int]:
    """Group workers by machine. Machines are in the order of their first worker.

    Adjacent ranks compute adjacent microbatches, so a machine's gradients form few nodes of the canonical tree.
    """
    machines = {number: (workers[number].about.get("host"), workers[number].about.get("address")) for number in numbers}
    order = list(dict.fromkeys(machines.values()))
    return sorted(numbers, key=lambda number: order.index(machines[number]))


def saver_of(members: Sequence[int], workers: Mapping[int, Worker]) -> int | None:
    """Return the worker that writes the final checkpoint: the first of the most advanced ready workers, or None."""
    ranks = {number: rank for rank, number in enumerate(members)}
    holders = [one for one in workers.values() if one.state == "ready" and one.progress is not None]
    holders.sort(key=lambda one: ranks.get(one.number, len(ranks)))
    if not holders:
        return None
    most = max(one.progress for one in holders if one.progress is not None)
    return next(one.number for one in holders if one.progress == most)
