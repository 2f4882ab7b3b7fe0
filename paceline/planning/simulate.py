"""Simulation of a step: each worker is a program that computes, sends and waits, on machines with a virtual clock.

::

    program    what a worker does, in order: Compute, Send, Exchange, Wait (:mod:`paceline.planning.programs`)
    machine    cores that its workers divide, and a link that carries one transfer after another in each direction
    arrival    a transfer has arrived when the link of the sender and that of the receiver have carried its bytes

A worker only waits in ``Wait``, so computing overlaps sending as it does in training. Workers that do the same at the
same time can be represented by one of them: its ``Exchange`` names the bytes that it sends and receives, not the peers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

from paceline.errors import InputError
from paceline.schedule.shares import even
from paceline.schedule.tree import nodes_of


class Compute(NamedTuple):
    """Compute for ``seconds`` of a core. ``load`` is the number of cores in use, 0 for a layer that sleeps."""

    seconds: float
    load: float = 1.0


class Send(NamedTuple):
    """Start to send bytes to a worker, which waits for the key."""

    to: int
    key: Hashable
    nbytes: float


class Exchange(NamedTuple):
    """Start an exchange of bytes between all workers of a group; each of them waits for the key.

    A worker has received its bytes when all others have started theirs, and the links have carried them.
    """

    group: tuple[int, ...]
    key: Hashable
    sent: float  # bytes that leave the worker's machine
    received: float  # bytes that reach it
    peers: int = 1  # workers on other machines that each worker exchanges them with
    asked: bool = False  # whether a worker sends when the receivers ask for it, behind what they are sending


class Call(NamedTuple):
    """Start a call that a thread of another worker answers; the caller waits for the key. A server answers in turn."""

    to: int
    key: Hashable
    sent: float
    received: float
    seconds: float = 0.0  # for which the server is busy
    copy: int | None = None  # worker to which the server sends it on between other transfers, before it answers


class Wait(NamedTuple):
    """Wait until the bytes of this key have arrived."""

    key: Hashable


Step = Compute | Send | Exchange | Call | Wait
Program = Generator[Step, None, None]


@dataclass(frozen=True)
class Machine:
    """Machine on which workers run."""

    cores: float = math.inf  # cores that its workers divide
    bytes_per_second: float = math.inf  # bandwidth of its link in each direction
    latency: float = 0.0  # seconds from the last byte of a transfer to the receiver's next operation
    speed: float = 1.0  # speed of computing, relative to the machine on which the times were measured
    shared: float = 1.0  # part of the bandwidth that is left where workers exchange data with more than one peer


@dataclass(frozen=True)
class Place:
    """Workers of a run."""

    machines: tuple[Machine, ...]  # the machines
    of_worker: tuple[int, ...]  # number of the machine of each worker
    simulated: tuple[int, ...] = ()  # ranks that are simulated, each for all others that do the same. Defaults to all.

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.of_worker)

    @property
    def speeds(self) -> list[float]:
        """Speed of the machine of each worker."""
        return [self.machines[at].speed for at in self.of_worker]

    @property
    def group(self) -> tuple[int, ...]:
        """Ranks that are simulated."""
        return self.simulated or tuple(range(self.workers))

    def folded(self, microbatches: int) -> Place:
        """Return these workers, of which one machine is simulated for all whose workers have as much to do."""
        shares = even(microbatches, self.workers)
        kinds = {
            (
                self.machines[self.of_worker[host[0]]],
                *((len(shares[one]), len(nodes_of(shares[one]))) for one in host),
            ): host
            for host in self.hosts
        }
        return replace(self, simulated=tuple(sorted(rank for host in kinds.values() for rank in host)))

    @cached_property
    def hosts(self) -> list[list[int]]:
        """Return the ranks of each machine that has any."""
        found: dict[int, list[int]] = {}
        for rank, at in enumerate(self.of_worker):
            found.setdefault(at, []).append(rank)
        return list(found.values())


@dataclass
class Outcome:
    """Times of each simulated worker, in seconds since the beginning."""

    ends: dict[int, float]  # when the worker's program ended
    waited: dict[int, dict[str, float]]  # for how long it waited, by the first part of the key

    @property
    def seconds(self) -> float:
        """Seconds until the last worker has ended."""
        return max(self.ends.values(), default=0.0)


@dataclass
class _Running:
    """Computation in progress on a machine."""

    rank: int
    left: float  # seconds of a core
    load: float


@dataclass
class _Meeting:
    """Exchange that some workers have not reached yet."""

    began: float
    sent: float = 0.0  # when the last worker that arrived has sent everything
    came: dict[int, Exchange] = field(default_factory=dict)


class Simulation:
    """Virtual clock of programs on machines.

    Args:
        machines: the machines.
        places: number of the machine of each worker.
    """

    def __init__(self, machines: Sequence[Machine], places: Sequence[int]) -> None:
        self._machines, self._places = machines, places
        self._events: list[tuple[float, int, int, int]] = []  # time, order, worker or ~machine, version of its finish
        self._count = 0
        self._out, self._in = [0.0] * len(machines), [0.0] * len(machines)
        self._running: list[list[_Running]] = [[] for _ in machines]
        self._updated, self._version = [0.0] * len(machines), [0] * len(machines)
        self._arrivals: dict[tuple[int, Hashable], float] = {}
        self._waiting: dict[tuple[int, Hashable], float] = {}
        self._meetings: dict[Hashable, _Meeting] = {}
        self._serving: dict[int, float] = defaultdict(float)  # when the server of a worker is free

    def run(self, programs: Mapping[int, Program]) -> Outcome:
        """Run a program for each simulated worker.

        Raises:
            InputError: workers wait for a message that no worker sends.
        """
        self._programs = programs
        self.outcome = Outcome({}, {rank: defaultdict(float) for rank in programs})
        for rank in programs:
            self._push(0.0, rank)
        while self._events:
            now, _, who, version = heappop(self._events)
            if who >= 0:
                self._advance(who, now)
            elif version == self._version[~who]:
                self._finish(~who, now)
        if self._waiting:
            rank, key = min(self._waiting, key=str)
            raise InputError(f"worker {rank} waits for {key}, which no worker sends: the programs have a deadlock")
        return self.outcome

    def _push(self, time: float, who: int, version: int = 0) -> None:
        self._count += 1
        heappush(self._events, (time, self._count, who, version))

    def _advance(self, rank: int, now: float) -> None:
        """Let a worker continue until it computes, waits or ends."""
        for step in self._programs[rank]:
            match step:
                case Compute():
                    if step.seconds > 0:
                        self._compute(rank, now, step)
                        return
                case Send():
                    self._send(rank, now, step)
                case Exchange():
                    self._exchange(rank, now, step)
                case Call():
                    self._call(rank, now, step)
                case Wait(key):
                    arrival = self._arrivals.pop((rank, key), None)
                    if arrival is None:
                        self._waiting[rank, key] = now
                        return
                    if arrival > now:
                        self._note_wait(rank, key, arrival - now)
                        self._push(arrival, rank)
                        return
        self.outcome.ends[rank] = now

    def _compute(self, rank: int, now: float, step: Compute) -> None:
        at = self._places[rank]
        seconds = step.seconds / self._machines[at].speed if step.load else step.seconds
        if not step.load or math.isinf(self._machines[at].cores):
            self._push(now + seconds, rank)
            return
        self._age(at, now)
        self._running[at].append(_Running(rank, seconds, step.load))
        self._plan_finish(at, now)

    def _pace(self, at: int) -> float:
        """Seconds of computing per second, for each of the workers that compute on a machine."""
        load = sum(one.load for one in self._running[at])
        return min(1.0, self._machines[at].cores / load) if load else 1.0

    def _age(self, at: int, now: float) -> None:
        """Record the work done on a machine since the last change there."""
        passed, pace = now - self._updated[at], self._pace(at)
        for one in self._running[at]:
            one.left -= passed * pace
        self._updated[at] = now

    def _plan_finish(self, at: int, now: float) -> None:
        self._version[at] += 1
        if self._running[at]:
            soonest = min(one.left for one in self._running[at])
            self._push(now + max(soonest, 0.0) / self._pace(at), ~at, self._version[at])

    def _finish(self, at: int, now: float) -> None:
        """End the computations of a machine that are done."""
        self._age(at, now)
        done = [one for one in self._running[at] if one.left <= 1e-12]
        self._running[at] = [one for one in self._running[at] if one.left > 1e-12]
        self._plan_finish(at, now)
        for one in done:
            self._advance(one.rank, now)

    def _send(self, rank: int, now: float, step: Send) -> None:
        source, target = self._places[rank], self._places[step.to]
        if source == target:  # through memory
            self._arrive(step.to, step.key, now, now)
            return
        sent = self._carry(self._out, source, now, step.nbytes)
        received = self._carry(self._in, target, now, step.nbytes)
        self._arrive(step.to, step.key, max(sent, received) + self._machines[source].latency, now)

    def _exchange(self, rank: int, now: float, step: Exchange) -> None:
        meeting = self._meetings.get((step.group, step.key))
        if meeting is None:
            meeting = self._meetings[step.group, step.key] = _Meeting(now)
        meeting.came[rank] = step
        if step.asked and step.received:
            meeting.began = max(meeting.began, now, self._out[self._places[rank]])
        if not step.asked:
            meeting.sent = max(meeting.sent, self._carry(self._out, self._places[rank], now, step.sent, step.peers))
        if len(meeting.came) < len(step.group):
            return
        del self._meetings[step.group, step.key]
        for other, own in meeting.came.items() if step.asked else ():
            if own.sent:
                meeting.began = max(meeting.began, self._in[self._places[other]])
                meeting.sent = self._carry(self._out, self._places[other], meeting.began, own.sent, own.peers)
        for other, own in meeting.came.items():
            at = self._places[other]
            received = self._carry(self._in, at, meeting.began, own.received, own.peers)
            self._arrive(other, own.key, max(meeting.sent, received, now) + self._machines[at].latency, now)

    def _call(self, rank: int, now: float, step: Call) -> None:
        source, target = self._places[rank], self._places[step.to]
        latency = 0.0 if source == target else self._machines[source].latency
        asked = now
        if step.sent and source != target:
            sent = self._carry(self._out, source, now, step.sent)
            asked = max(sent, self._carry(self._in, target, now, step.sent))
        answered = self._serving[step.to] = max(self._serving[step.to], asked + latency) + step.seconds
        if step.copy is not None:
            answered += step.sent / min(self._rate(one) for one in (target, self._places[step.copy]))
        if step.received and source != target:
            sent = self._carry(self._out, target, answered, step.received)
            answered = max(sent, self._carry(self._in, source, answered, step.received))
        self._arrive(rank, step.key, answered + latency, now)

    def _carry(self, links: list[float], at: int, now: float, nbytes: float, peers: int = 1) -> float:
        """Return the time at which a link has carried bytes between machines, after those that it carries already."""
        links[at] = max(now, links[at]) + nbytes / self._rate(at, peers)
        return links[at]

    def _rate(self, at: int, peers: int = 1) -> float:
        return self._machines[at].bytes_per_second * (self._machines[at].shared if peers > 1 else 1.0)

    def _arrive(self, rank: int, key: Hashable, time: float, now: float) -> None:
        since = self._waiting.pop((rank, key), None)
        if since is None:
            self._arrivals[rank, key] = time
            return
        self._note_wait(rank, key, max(time, now) - since)
        self._push(max(time, now), rank)

    def _note_wait(self, rank: int, key: Hashable, seconds: float) -> None:
        name = key[0] if isinstance(key, tuple) else key
        self.outcome.waited[rank][str(name)] += seconds
