"""Candidates for a run, each with the predicted time of a step and memory of a worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from paceline.errors import ConfigError
from paceline.planning.costs import Profile
from paceline.planning.memory import Run, need
from paceline.planning.programs import Place, Work, data_parallel, local, pipeline
from paceline.planning.renting.money import Bill
from paceline.planning.simulate import Machine, Program, Simulation
from paceline.schedule.balance import Cluster, balance
from paceline.schedule.link_shares import WINDOW_BUCKETS, full
from paceline.schedule.pipeline.choice import synchronous_schedule
from paceline.schedule.slices import STAGES
from paceline.settings import LocalSettings, PipelineSettings

_STEPS = 2, 4
"""Numbers of simulated steps; the time of a step is taken between them."""
_SIMULATED = 64
"""Largest number of workers that are simulated one by one."""
_LOCAL = LocalSettings()
_SCHEDULES = "1f1b", "zb-h1"
_WAITS = {
    "header": "for the slowest worker",
    "norms": "for the slowest worker",
    "gradients": "for gradients",
    "sums": "for gradients",
    "means": "for means or weights",
    "activations": "for other stages",
}
"""What a worker waits for, by the first part of a key."""
_TOLD = 0.01
"""Least part of a step that a wait takes to be told."""


@dataclass(frozen=True)
class Measured:
    """What was measured of a model with a number of workers on one machine.

    Attributes:
        work: costs.
        profile: sizes and layers.
        spread: relative distance of measured steps from their median.
    """

    work: Work
    profile: Profile
    spread: float


@dataclass(frozen=True)
class Layout:
    """Workers on machines of one type.

    Attributes:
        machine: a machine.
        per_machine: workers on each machine.
        memory_bytes: memory of a worker; infinite if unknown.
        name: name of the type.
    """

    machine: Machine
    per_machine: int
    memory_bytes: float = math.inf
    name: str = "this machine"

    def place(self, workers: int) -> Place:
        """Return the machines of so many workers."""
        of_worker = tuple(rank // self.per_machine for rank in range(workers))
        return Place((self.machine,) * (of_worker[-1] + 1), of_worker)


@dataclass(frozen=True)
class Candidate:
    """A way to run the training, with its predicted time and memory.

    Attributes:
        strategy: name of the strategy.
        workers: number of workers.
        settings: settings besides the strategy.
        machine: type of the machines.
        step_seconds: seconds of a step.
        low: lower end of the interval of these seconds.
        high: upper end.
        memory_bytes: bytes of weights, gradients, optimizer state and activations of a worker.
        waits: seconds of a step in which the slowest worker waits, by what for.
        fits: whether the memory is enough.
        machines: number of machines.
        spot: whether the provider may take the machines away.
        standbys: further machines that wait for one to be lost.
        bill: what the whole training takes. None: its length or the prices are unknown.
    """

    strategy: str
    workers: int
    settings: Mapping[str, Any]
    machine: str
    step_seconds: float
    low: float
    high: float
    memory_bytes: int
    waits: Mapping[str, float] = field(default_factory=dict)
    fits: bool = True
    machines: int = 1
    spot: bool = False
    standbys: int = 0
    bill: Bill | None = None

    @property
    def time(self) -> float:
        """What users wait for: the hours of the bill, or else the seconds of a step."""
        return self.step_seconds if self.bill is None else self.bill.hours.mean

    @property
    def price(self) -> float:
        """What users pay: the money of the bill, or else the seconds of a step of all workers."""
        return self.workers * self.step_seconds if self.bill is None else self.bill.money.mean


def candidates(
    measured: Mapping[int, Measured], layout: Layout, counts: Sequence[int], exact: bool, convergent: bool
) -> Iterator[Candidate]:
    """Yield what is possible with each number of workers.

    Args:
        measured: what was measured, by the number of workers that computed at the same time on a machine.
        layout: the machines.
        counts: numbers of workers.
        exact: whether workers send whole nodes of the canonical tree.
        convergent: whether strategies are allowed that compute another function.
    """
    for workers in (count for count in counts if count <= measured[min(measured)].profile.microbatches):
        known = _nearest(measured, min(workers, layout.per_machine))
        place, sizes = layout.place(workers), known.profile.sizes
        together = measured[min(2, workers, max(measured))].work  # workers that tell each other something in a step
        work = replace(known.work, overhead=together.overhead)
        folded = place if workers <= _SIMULATED else place.folded(work.microbatches)
        judge = _Judge(layout, folded, known.spread)
        if workers == 1:
            yield judge(
                "allreduce", {}, partial(data_parallel, work, folded), _memory(sizes, work, workers=1, tree=exact)
            )
            continue
        run = partial(_memory, sizes, work, workers=workers, tree=exact)
        yield judge("allreduce", {}, partial(data_parallel, work, folded, exact=exact), run())
        holders = known.profile.holders(len(place.machines), workers)
        for shard, stage in STAGES.items():
            shared = layout.per_machine if stage == STAGES["parameters"] else 1
            sharing = min(shared, workers)
            program = partial(data_parallel, work, folded, exact=exact, stage=stage)
            window = min(sizes.gradients, WINDOW_BUCKETS * full(workers))
            yield judge(
                "sharded", {"shard": shard}, program, run(stage=stage, sharing=sharing, window=window, holders=holders)
            )
        judge = _Judge(layout, place, known.spread)
        yield from _pipelines(replace(known, work=work), place, judge)
        if convergent and work.microbatches % _LOCAL.replicas == 0 and workers <= _LOCAL.replicas:
            given = {"local": {"every": _LOCAL.every, "replicas": _LOCAL.replicas}}
            program = partial(local, work, place, replicas=_LOCAL.replicas, every=_LOCAL.every, exact=exact)
            held = -(-_LOCAL.replicas // workers)
            optimizer = held * sizes.optimizer + sizes.gradients  # and the outer momentum
            replicas = replace(sizes, weights=sizes.weights + held * sizes.gradients, optimizer=optimizer)
            yield judge("diloco", given, program, _memory(replicas, work, workers=workers), period=_LOCAL.every)


def _nearest(measured: Mapping[int, Measured], workers: int) -> Measured:
    """Return what was measured with the most workers, but no more than these."""
    return measured[max((count for count in measured if count <= workers), default=min(measured))]


def _memory(sizes: Run, work: Work, **changes: Any) -> int:
    return need(replace(sizes, **changes), fused=work.fused).total


def _pipelines(known: Measured, place: Place, judge: _Judge) -> Iterator[Candidate]:
    """Yield pipelines of as many stages as workers, cut where the stages take equally long."""
    work, workers, layers = known.work, place.workers, known.work.layers(1)
    if workers > len(layers):
        return
    rate = place.machines[0].bytes_per_second
    cut = balance(layers, workers, Cluster(rate, None, workers, work.microbatches))
    if len(cut.bounds) < workers:
        return
    for kind in _SCHEDULES:
        settings = PipelineSettings(schedule=kind, cut=cut.names)
        schedule = synchronous_schedule(settings, workers, work.microbatches)
        given = {"pipeline": {"schedule": kind, "cut": list(cut.names)}}
        program = partial(pipeline, work, place, schedule=schedule, bounds=cut.bounds)
        sizes = known.profile.sizes
        of_stage = [sum(layer.parameter_bytes for layer in layers[slice(*bound)]) for bound in cut.bounds]
        kept = [sum(layer.kept_bytes for layer in layers[slice(*bound)]) for bound in cut.bounds]
        share = [one / max(work.parameter_bytes, 1) for one in of_stage]
        states = sizes.weights + sizes.gradients + sizes.optimizer
        needed = max(
            part * states + bytes_kept * min(workers - stage, work.microbatches)
            for stage, (part, bytes_kept) in enumerate(zip(share, kept, strict=True))
        )
        yield judge("pipeline", given, program, int(needed))


@dataclass(frozen=True)
class _Judge:
    """Simulates candidates with some workers."""

    layout: Layout
    place: Place
    spread: float

    def __call__(
        self,
        strategy: str,
        settings: Mapping[str, Any],
        program: Callable[[int, int], Program],
        memory_bytes: int,
        period: int = 1,
    ) -> Candidate:
        workers, place = self.place.workers, self.place
        ends, waits = [], {}
        for steps in (period * count for count in _STEPS):
            simulation = Simulation(place.machines, place.of_worker)
            outcome = simulation.run({rank: _repeated(program, rank, steps) for rank in place.group})
            ends.append(outcome.seconds)
            waits = {name: seconds / steps for name, seconds in outcome.waited[place.group[-1]].items()}
        seconds = (ends[1] - ends[0]) / (period * (_STEPS[1] - _STEPS[0]))
        return Candidate(
            strategy,
            workers,
            settings,
            self.layout.name,
            seconds,
            seconds / (1 + self.spread),
            seconds * (1 + self.spread),
            memory_bytes,
            waits,
            memory_bytes <= self.layout.memory_bytes,
            -(-workers // self.layout.per_machine),
        )


def _repeated(program: Callable[[int, int], Program], rank: int, steps: int) -> Program:
    for step in range(steps):
        yield from program(rank, step)


def best(found: Sequence[Candidate], cheapest: bool = False) -> list[Candidate]:
    """Return the candidates that fit, the fastest or the cheapest first.

    Raises:
        ConfigError: nothing fits.
    """
    fitting = [one for one in found if one.fits]
    if fitting:
        if cheapest:
            return sorted(fitting, key=lambda one: (one.price, one.time, one.memory_bytes))
        return sorted(fitting, key=lambda one: (one.time, one.price, one.memory_bytes))
    least = min(found, key=lambda one: one.memory_bytes)
    raise ConfigError(
        f"Nothing fits into the memory of a worker: the least is {least.memory_bytes:,} bytes, with {named(least)}. "
        f"Give more memory, or more workers with -n."
    )


def front(found: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that no other one beats in both time and price."""
    fitting = [one for one in found if one.fits and math.isfinite(one.time)]
    return [
        one
        for one in fitting
        if not any(
            other.time <= one.time and other.price <= one.price and (other.time, other.price) != (one.time, one.price)
            for other in fitting
        )
    ]


def explained(ordered: Sequence[Candidate], word: str = "fastest") -> list[str]:
    """Say which candidate is the first, and for each other strategy what its best one takes, and why.

    Args:
        ordered: the candidates, the best first.
        word: what the first one is.
    """
    first, *others = ordered
    same = [one for one in others if one.machine == first.machine]
    alone = next((one for one in same if one.workers == 1 < first.workers), None)
    gain = f", {alone.step_seconds / first.step_seconds:.1f} times as fast as one worker" if alone else ""
    lines = [f"The {word} is {named(first)}: {_takes(first)}{gain}."]
    told = {first.strategy}
    for one in others:
        if one.strategy in told or one.workers == 1:
            continue
        told.add(one.strategy)
        reason = max(one.waits, key=lambda name: one.waits[name], default="")
        told_of = one.waits.get(reason, 0.0) >= _TOLD * one.step_seconds
        waits = f"; of a step it waits {_time(one.waits[reason])} {_WAITS.get(reason, reason)}" if told_of else ""
        lines.append(f"{named(one)} takes {_takes(one)}{waits}.")
    return lines


def named(one: Candidate) -> str:
    """Name a candidate for people."""
    given = one.settings.get("shard") or one.settings.get("pipeline", {}).get("schedule")
    waiting = f" + {one.standbys} that waits" if one.standbys else ""
    rented = "" if one.bill is None else f" ({one.machines} {one.machine}{', spot' * one.spot}{waiting})"
    return f"{one.strategy}{f' ({given})' if given else ''} on {one.workers} worker{'s' * (one.workers > 1)}{rented}"


def _takes(one: Candidate) -> str:
    step = f"{_time(one.step_seconds)} a step"
    if one.bill is None:
        return step
    return f"{one.time:.3g} h for {one.price:,.2f} {one.bill.currency}, {step}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
