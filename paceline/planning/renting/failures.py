"""Price of failures: replay of many histories of interrupted machines against a training run, on a virtual clock.

::

    train ----x stall | train on the other machines ----+ stall | train on all ----------
              |                                         |
              a machine is lost                         its replacement has started

A lost machine costs a stall, and the step in progress. If no machine is left that holds some part of the state,
training goes back to the last checkpoint. A standby takes the place of a lost machine within the stall. Training on n
of N machines takes N / n as long, because they compute the same batch. Times are in seconds, unless a name says hours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import islice
from random import Random
from statistics import fmean
from typing import NamedTuple

from paceline.checkpoint.interval import best_interval
from paceline.planning.renting.interruptions import Interruptions

_PROBES = 100
"""Histories from which the mean time between two losses of the state is estimated."""
_MOST = 20
"""Multiple of the undisturbed time after which a history counts as one that never ends."""
_EVENTS = 50_000
"""Number of lost machines after which a history counts as one that never ends, and no further one is replayed."""
_HOPELESS = 5
"""Number of histories after which a replay stops if none of them ends."""


@dataclass(frozen=True)
class Job:
    """Training run on machines that may be lost."""

    steps: int  # number of steps
    step_seconds: float  # seconds of a step on all machines
    machines: int  # number of machines that train
    # number of machines that hold each part of the state: all machines for replicas (``allreduce``), the holders of
    # ``sharded``, and 1 if each part is on one machine only, as in a pipeline without replicas
    copies: int
    recovery_seconds: float  # seconds that training stalls when a machine is lost or joins
    restart_seconds: float = 0.0  # further seconds to load a checkpoint
    start_up_seconds: float = 0.0  # seconds from the request of a replacement until it can join
    checkpoint_seconds: float = 0.0  # seconds that training stalls for a save
    interval_seconds: float = math.inf  # seconds of training between two saves. Infinite: no saves.
    standbys: int = 0  # machines that wait for another one to be lost

    def __post_init__(self) -> None:
        assert self.steps > 0 and self.step_seconds > 0 and self.interval_seconds > 0 and self.standbys >= 0
        assert 1 <= self.copies <= self.machines

    @property
    def ideal_seconds(self) -> float:
        """Seconds of the steps if nothing fails and nothing is saved."""
        return self.steps * self.step_seconds


class Spread(NamedTuple):
    """Mean of a value over histories, and the interval that holds 90 % of them."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of these values.

        >>> Spread.of([3.0, 1.0, 2.0])
        Spread(mean=2.0, low=1.0, high=3.0)
        """
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(fmean(ordered), ordered[math.floor(0.05 * last)], ordered[math.ceil(0.95 * last)])


class History(NamedTuple):
    """What happened in a replay."""

    seconds: float  # seconds from the first step to the last. Infinite if training never ends.
    machine_seconds: float  # seconds of all machines, standbys and starting replacements included
    interruptions: int  # number of lost machines
    rollbacks: int  # number of times that training went back to a checkpoint


@dataclass(frozen=True)
class Expected:
    """Expected course of a run, from many histories."""

    job: Job
    histories: tuple[History, ...]

    @property
    def hours(self) -> Spread:
        """Hours from the first step to the last."""
        return Spread.of([one.seconds / 3600 for one in self.histories])

    @property
    def goodput(self) -> Spread:
        """Part of the time in which steps were computed that count, at the pace of all machines."""
        return Spread.of([self.job.ideal_seconds / one.seconds for one in self.histories])

    @property
    def rollback_seconds(self) -> float:
        """Mean seconds between two times that training goes back to a checkpoint. Infinite if it never does."""
        rollbacks = sum(one.rollbacks for one in self.histories)
        return sum(one.seconds for one in self.histories) / rollbacks if rollbacks else math.inf


def replay(job: Job, interruptions: Interruptions, histories: int = 1000, seed: int = 0) -> Expected:
    """Return the expected course of a run, from replays of random histories.

    >>> from paceline.planning.renting.interruptions import Exponential
    >>> job = Job(steps=3600, step_seconds=1.0, machines=4, copies=4, recovery_seconds=1.0)
    >>> replay(job, Exponential(per_hour=0.0), histories=2).goodput
    Spread(mean=1.0, low=1.0, high=1.0)
    """
    found: list[History] = []
    for number in range(histories):
        found.append(_Replay(job).run(interruptions, Random(f"{seed} {number}")))
        lost = sum(one.interruptions for one in found)
        if number + 1 >= _HOPELESS and (lost > _EVENTS or all(math.isinf(one.seconds) for one in found)):
            break
    return Expected(job, tuple(found))


def best_checkpoint_interval(job: Job, interruptions: Interruptions, seed: int = 0) -> float:
    """Return the seconds of training between two saves with which failures and saves cost least.

    The formula is that of ``checkpoint.every = "auto"``. Its mean time between failures is that between two losses of
    the state, in replays in which saves are free. The result is infinite if none of them lost the state.
    """
    free = replace(job, checkpoint_seconds=0.0, interval_seconds=job.step_seconds)
    between = replay(free, interruptions, _PROBES, seed).rollback_seconds
    return between if math.isinf(between) else max(best_interval(job.checkpoint_seconds, between), job.step_seconds)


@dataclass
class _Replay:
    """One history of a run. Machines have numbers, and a replacement has that of the machine that it replaces."""

    job: Job
    now: float = 0.0
    done: float = 0.0  # steps
    saved: float = 0.0  # steps in the last checkpoint
    phase: float = 0.0  # seconds since the last save ended: first those of training, then those of the next save
    stalled: float = 0.0  # until this time
    lost: int = 0  # training machines lost since the last step
    holders: int = 0  # machines that had the state at the first of these losses
    unloaded: bool = False  # whether a checkpoint must be loaded before training continues
    rollbacks: int = 0
    absent: float = 0.0  # seconds for which the provider had no machine, over all machines
    training: set[int] = field(default_factory=set)
    standbys: list[int] = field(default_factory=list)
    joining: list[tuple[float, int]] = field(default_factory=list)  # time and number, as a heap

    def run(self, interruptions: Interruptions, random: Random) -> History:
        """Replay a history to its end."""
        slots, count = self.job.machines + self.job.standbys, 0
        self.training, self.standbys = set(range(self.job.machines)), list(range(self.job.machines, slots))
        limit = _MOST * self.job.ideal_seconds
        for time, hit, delay in islice(interruptions.history(random, slots), _EVENTS):
            while self.joining and self.joining[0][0] <= time:
                if self._advance(self.joining[0][0]):
                    break
                self._join(heappop(self.joining)[1])
            if self._advance(time):
                late = sum(max(one - self.job.start_up_seconds - self.now, 0.0) for one, _ in self.joining)
                return History(self.now, slots * self.now - self.absent + late, count, self.rollbacks)
            if time > limit:
                break
            count += self._interrupt(hit, delay)
        return History(math.inf, math.inf, count, self.rollbacks)

    def _advance(self, until: float) -> bool:
        """Train until a time, and return whether training has ended before it."""
        job, begin = self.job, max(self.now, self.stalled)
        if self.done >= job.steps:
            return True
        if begin >= until or not self.training:
            self.now = until
            return False
        self.lost, self.unloaded = 0, False
        pace = len(self.training) / job.machines / job.step_seconds  # steps per second
        interval, cycle = job.interval_seconds, job.interval_seconds + job.checkpoint_seconds
        trained = min(self.phase, interval)
        target = trained + (job.steps - self.done) / pace
        saves = max(math.ceil(target / interval) - 1, 0)  # no save after the last step
        end = begin + target + saves * job.checkpoint_seconds - self.phase
        if end <= until:
            self.now, self.done = end, job.steps
            return True
        cycles, self.phase = divmod(self.phase + until - begin, cycle)
        since = min(self.phase, interval)  # seconds of training since the last save
        self.done += ((cycles * interval if cycles else 0.0) + since - trained) * pace
        if cycles:
            self.saved = self.done - since * pace
        self.now = until
        return False

    def _interrupt(self, hit: Sequence[int], delay: float) -> int:
        """Lose the machines with these numbers that are up, and return how many they are."""
        before = len(self.training)
        lost = [one for one in hit if one in self.training or one in self.standbys]
        for one in lost:
            self.absent += delay
            heappush(self.joining, (self.now + delay + self.job.start_up_seconds, one))
        self.training.difference_update(lost)
        self.standbys = [one for one in self.standbys if one not in lost]
        if len(self.training) == before:
            return len(lost)
        if not self.lost:
            self.holders = min(self.job.copies, before)
        self.lost += before - len(self.training)
        self.done, self.phase = math.floor(self.done + 1e-9), min(self.phase, self.job.interval_seconds)
        if self.lost >= self.holders:
            self.done, self.phase, self.unloaded = self.saved, 0.0, True
            self.lost, self.rollbacks = 0, self.rollbacks + 1
        self._stall()
        while self.standbys and len(self.training) < self.job.machines:
            self.training.add(self.standbys.pop())
        return len(lost)

    def _join(self, machine: int) -> None:
        if len(self.training) == self.job.machines:
            self.standbys.append(machine)
            return
        self.training.add(machine)
        self._stall()

    def _stall(self) -> None:
        loading = self.job.restart_seconds if self.unloaded else 0.0
        self.stalled = max(self.stalled, self.now + self.job.recovery_seconds + loading)
