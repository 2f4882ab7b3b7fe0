"""Settings that would save time in a run, with the shares of the time that they save.

A setting is advised only if the run would accept it and the records show what it saves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from paceline.observe.ledger import is_asynchronous
from paceline.observe.records import Record, number
from paceline.observe.why.times import Times
from paceline.schedule.shares import even
from paceline.schedule.speed_shares import fit_counts

CROWDED = 0.1
"""Smallest reported share of the time in which workers lack a core. Loader processes would lack one, too."""
_STOLEN = 64  # microbatches of a worker from which more of them would save no more time
_SAVING = 0.01
"""Share of the time that saves take at the best interval, sqrt(stall / (2 MTBF)), for 20 s and a day."""
_MOST_LOADERS, _HANDOVER_SECONDS = 8, 0.002
"""Number of loader processes, and time to get a microbatch from one: 1.5 to 2.3 ms for two tensors, torch 2.13."""
_RELOADED = 256  # newest steps for which loader processes are simulated
_ROUNDS = 2
"""Consecutive messages of an exchange, sums to their owners and means to all, each of which takes the latency."""


@dataclass(frozen=True)
class Advice:
    """Setting that would save a share of the time."""

    set: str  # ``key=value``
    gain: float


@dataclass
class Cores:
    """Seconds of the steps of a worker."""

    total: float = 0.0
    lacked: float = 0.0  # ready to run, without a core

    def add(self, step: Record) -> None:
        """Add a record of a step. Records of older versions lack the time for which the worker had no core."""
        seconds, between, lacked = (number(step.get(name)) or 0.0 for name in ("seconds", "between", "delayed"))
        self.total += seconds + between
        self.lacked += lacked

    @property
    def delayed(self) -> float:
        """Share of the time without a core."""
        return min(1.0, max(0.0, self.lacked / max(self.total, 1e-9)))


def advise(
    shares: Mapping[str, float],
    start: Mapping[str, Any],
    steps: Sequence[Mapping[int, Times]],
    second: float,
    least: float,
    fixed: bool,
) -> list[Advice]:
    """Return settings that would save time, with the shares that they save, the largest first.

    Args:
        shares: share of the time that is lost by each kind of culprit.
        start: settings of the run, and which others it would accept, from its event ``start``, with ``latency``, in
            seconds, if it has a network, and ``crowded``, whether workers lack cores.
        steps: durations of each step by rank.
        second: share of the time that a second in each step would be.
        least: smallest share that is worth a change.
        fixed: whether the data set stays the same. If not, loader processes would not see the changes.
    """
    if is_asynchronous(start):
        return []
    gains, strategy, accepts = {}, start.get("strategy"), start.get("accepts", ())  # older versions tell of none
    steals = strategy == "allreduce" and "strategy=stealing" in accepts and not start.get("located")
    if steals and shares.get("compute"):
        gains["strategy=stealing"] = _stealing(steps, start) * second
    if (share := shares.get("load")) and fixed and not (start.get("stream") or start.get("crowded")):
        rest, before = max(1e-4, 1 - share), number(start.get("workers_per_loader"))
        load = before or share  # loader processes that are too slow have been busy all the time
        processes = min(_MOST_LOADERS, max(2, math.ceil(load / rest)))
        gain = 1 - max(rest, load / processes) if before else _loading(steps[-_RELOADED:], start, processes) * second
        gains[f"workers_per_loader={processes}"] = gain
    narrows = strategy in ("allreduce", "stealing") and start.get("wire") == "float32" and "wire=bfloat16" in accepts
    if narrows and (latency := start.get("latency")) is not None:
        gains["wire=bfloat16"] = (shares.get("exchange", 0.0) - _ROUNDS * latency * second) / 2
    if type(start.get("checkpoint.every")) is int and "checkpoint.every=auto" in accepts:
        gains["checkpoint.every=auto"] = shares.get("checkpoint", 0.0) - _SAVING
    found = [Advice(key, round(gain, 4)) for key, gain in gains.items() if gain >= least]
    return sorted(found, key=lambda one: -one.gain)


def _stealing(steps: Sequence[Mapping[int, Times]], start: Mapping[str, Any]) -> float:
    """Return the seconds of a step that work stealing would save: each worker computes what fits its speed.

    A pause of a worker cannot be stolen, so only the time that a worker takes in three of four steps counts, and
    nothing if pauses take more than that.
    """
    computing = [[step[rank].compute for step in steps if rank in step] for rank in steps[-1]]
    usual = [sorted(seconds)[len(seconds) // 4] for seconds in computing]
    mean = [fmean(seconds) for seconds in computing]
    if max(usual) - median(usual) < (max(mean) - median(mean)) / 2:
        return 0.0
    total = max(len(usual), int(min(number(start.get("microbatches")) or math.inf, _STOLEN * len(usual))))
    each = [one / len(share) for one, share in zip(usual, even(total, len(usual)), strict=True)]
    together = max(one * count for one, count in zip(each, fit_counts(total, each), strict=True))
    return max(usual) - together


def _loading(steps: Sequence[Mapping[int, Times]], start: Mapping[str, Any], processes: int) -> float:
    """Return the seconds of a step that loader processes would save, found by simulating them.

    Loader processes take microbatches in turn, and each is at most two ahead. A worker gets all microbatches of a step
    before it computes the first. The loading time of a step beyond the median is taken as that of one costly
    microbatch.
    """
    steps = [step for step in steps if step.keys() == steps[-1].keys()]
    loading = max(1, len(steps[-1]) - int(number(start.get("servers")) or 0))  # dedicated servers load nothing
    count = min(_STOLEN, math.ceil((number(start.get("microbatches")) or 1) / loading))
    usual = {rank: median(step[rank].load for step in steps) for rank in steps[-1]}
    free = {rank: [0.0] * processes for rank in usual}  # when each process can load again
    taken = {rank: [0.0] * 2 * processes for rank in usual}  # when the worker took the newest microbatches
    end = 0.0
    for at, step in enumerate(steps):
        begin, place = end, at * count
        for rank, times in step.items():
            more, now = max(0.0, times.load - usual[rank]), begin
            for part in range(place, place + count):
                ready = max(free[rank][part % processes], taken[rank][part % len(taken[rank])])
                ready += (times.load - more) / count + (more if part - place == at % count else 0.0)
                now = max(now, ready) + _HANDOVER_SECONDS
                free[rank][part % processes] = ready
                taken[rank][part % len(taken[rank])] = now
            end = max(end, now + times.own - times.load)
    return (sum(max(times.own for times in step.values()) for step in steps) - end) / len(steps)
