"""Candidates for a run, each with the predicted time of a step and memory of a worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from paceline.errors import ConfigError
from paceline.planning.costs import Profile, Work
from paceline.planning.memory import Run, need, of_replicas, of_servers
from paceline.planning.programs import asynchronous, data_parallel, local, pipeline
from paceline.planning.reductions import Updaters
from paceline.planning.renting.money import Bill
from paceline.planning.simulate import Machine, Place, Program, Simulation
from paceline.schedule.balance import Cluster, balance, fit_bounds
from paceline.schedule.link_shares import window_bytes
from paceline.schedule.pipeline.choice import synchronous_schedule
from paceline.schedule.slices import STAGES
from paceline.schedule.speed_shares import contiguous, fit_counts
from paceline.settings import LocalSettings, PipelineSettings, ServerSettings

_STEPS = 2, 4
"""Numbers of simulated steps; the time of a step is taken between them."""
_SIMULATED = 64
"""Largest number of workers that are simulated one by one."""
_LOCAL, _SERVERS = LocalSettings(), ServerSettings()
_SCHEDULES = "1f1b", "zb-h1"
_WAITS = {
    "header": "for the slowest worker",
    "norms": "for the slowest worker",
    "gradients": "for gradients",
    "sums": "for gradients",
    "means": "for means",
    "weights": "for weights",
    "activations": "for other stages",
}
"""Objects of a worker's waits, by the first part of a key."""
_TOLD = 0.01
"""Smallest part of a step for which a wait is reported."""


@dataclass(frozen=True)
class Measured:
    """Measurements of a model with a number of workers on one machine."""

    work: Work  # costs
    profile: Profile  # sizes and layers
    spread: float  # relative distance of measured steps from their median
    first_bytes: int = 0  # bytes of tensors in the first step of all-reduce, with its probes
    kept_bytes: int = 0  # bytes of freed tensors that the allocator keeps

    def first(self, sums: int, sharing: int = 1) -> int:
        """Return the bytes of tensors in the first step of another strategy.

        Args:
            sums: bytes of sums and means in shared memory, where all-reduce has those of all gradients.
            sharing: workers that share one copy of the weights.
        """
        sizes = self.profile.sizes
        saved = sizes.gradients - sums if sizes.workers > 1 else 0
        return max(0, self.first_bytes - saved - sizes.weights + sizes.weights // sharing)


@dataclass(frozen=True)
class Layout:
    """Workers on machines."""

    machine: Machine  # a machine
    per_machine: int  # workers on each machine
    memory_bytes: float = math.inf  # memory of a worker; infinite if unknown
    name: str = "this machine"  # name of the type
    others: tuple[Machine, ...] = ()  # the machines after the first, if they differ from it

    def place(self, workers: int) -> Place:
        """Return the machines of ``workers`` workers."""
        of_worker = tuple(rank // self.per_machine for rank in range(workers))
        count = of_worker[-1] + 1
        return Place((self.machine, *(self.others or (self.machine,) * count))[:count], of_worker)


@dataclass(frozen=True)
class Candidate:
    """A way to run the training, with its predicted time and memory."""

    strategy: str  # name of the strategy
    workers: int  # number of workers
    settings: Mapping[str, Any]  # settings besides the strategy
    machine: str  # type of the machines
    step_seconds: float  # seconds of a step
    low: float  # lower end of the interval of these seconds
    high: float  # upper end
    memory_bytes: int  # bytes of a worker: of its process, or on a GPU of its tensors
    tensor_bytes: int  # bytes of its weights, gradients, optimizer state and activations
    # seconds of a step in which the slowest worker waits, by cause
    waits: Mapping[str, float] = field(default_factory=dict)
    fits: bool = True  # whether the memory is enough
    machines: int = 1  # number of machines
    spot: bool = False  # whether the provider may take the machines away
    standbys: int = 0  # further machines that wait for one to be lost
    # hours and money of the whole training, such as ``bill.money.mean``. None if its length or prices are unknown.
    bill: Bill | None = None

    @property
    def meets(self) -> bool:
        """Whether the workers wait for each other in each step, so that all steps take equally long."""
        return self.strategy != "diloco" and self.settings.get("server", {}).get("mode") != "async"

    @property
    def time(self) -> float:
        """Time to minimize: the hours of the bill, or else the seconds of a step."""
        return self.step_seconds if self.bill is None else self.bill.hours.mean

    @property
    def price(self) -> float:
        """Cost to minimize: the money of the bill, or else the seconds of a step of all workers."""
        return self.workers * self.step_seconds if self.bill is None else self.bill.money.mean


def candidates(
    measured: Mapping[int, Measured], layout: Layout, counts: Sequence[int], exact: bool, convergent: bool
) -> Iterator[Candidate]:
    """Yield the possible plans with each number of workers.

    Args:
        measured: measurements, by the number of workers that computed at the same time on a machine.
        layout: the machines.
        counts: numbers of workers.
        exact: whether workers send whole nodes of the canonical tree.
        convergent: whether strategies are allowed that compute another function.
    """
    for workers in (count for count in counts if count <= measured[min(measured)].profile.microbatches):
        known = _nearest(measured, min(workers, layout.per_machine))
        place, sizes = layout.place(workers), known.profile.sizes
        alone, together = (measured[count].work for count in (min(measured), min(2, workers, max(measured))))
        work = replace(
            known.work,
            overhead=together.overhead,
            message_seconds=together.message_seconds,
            pass_seconds=alone.pass_seconds,
            half_pass_seconds=alone.half_pass_seconds,
        )
        folded = place if workers <= _SIMULATED else place.folded(work.microbatches)
        judge = _Judge(layout, folded, known)
        run = partial(_memory, sizes, work, workers=workers, tree=exact)
        if workers == 1:
            yield judge("allreduce", {}, partial(data_parallel, work, folded), run())
            continue
        machines, inside = len(place.machines), min(map(len, place.hosts))
        inbox = sizes.gradients * (machines - 1) // (machines * inside)  # for the sums of other machines
        yield judge("allreduce", {}, partial(data_parallel, work, folded, exact=exact), run() + inbox)
        yield from _sharded(work, judge, exact, run)
        if workers > _SIMULATED:
            continue
        judge = _Judge(layout, place, known)
        if len({*place.speeds}) > 1:
            shares = contiguous(fit_counts(work.microbatches, [1 / speed for speed in place.speeds]))
            stolen = run(even_shares=False) + inbox
            yield judge("stealing", {}, partial(data_parallel, work, place, exact=exact, shares=shares), stolen)
        yield from _servers(work, place, judge, exact, convergent, run)
        for stages in range(2, workers + 1):
            if workers % stages == 0:
                yield from _pipelines(replace(known, work=work), place, judge, stages)
        if convergent and work.microbatches % _LOCAL.replicas == 0 and workers <= _LOCAL.replicas:
            given = {"local": {"every": _LOCAL.every, "replicas": _LOCAL.replicas}}
            program = partial(local, work, place, replicas=_LOCAL.replicas, every=_LOCAL.every, exact=exact)
            held = -(-_LOCAL.replicas // workers)
            parts = sizes.weights, sizes.optimizer, sizes.gradients
            weights, optimizer = of_replicas(_LOCAL, held, workers, False, *parts)  # only elastic runs keep points
            replicas = replace(sizes, weights=weights, optimizer=optimizer)
            # inner steps have gradients beside the buffers of outer gradients and of their means
            tensors = _memory(replicas, work, workers=workers) + 2 * sizes.gradients + inbox
            yield judge("diloco", given, program, tensors, period=_LOCAL.every)


def _nearest(measured: Mapping[int, Measured], workers: int) -> Measured:
    """Return the measurements with the most workers, but with at most ``workers`` if there are any."""
    return measured[max((count for count in measured if count <= workers), default=min(measured))]


def _memory(sizes: Run, work: Work, **changes: Any) -> int:
    return need(replace(sizes, **changes), fused=work.fused).total


def _sharded(work: Work, judge: _Judge, exact: bool, run: Callable[..., int]) -> Iterator[Candidate]:
    """Yield each division of the state. ``run`` returns the bytes of a run on these workers."""
    known, place, sizes, workers = judge.known, judge.place, judge.known.profile.sizes, judge.place.workers
    machines = len(place.machines)
    holders = known.profile.holders(machines, workers)
    for shard, stage in STAGES.items():
        shared, windowed = shard == "parameters", shard != "optimizer"
        sharing = min(judge.layout.per_machine, workers) if shared else 1
        owners = Updaters(workers, holders - 1, shared, windowed)
        program = partial(data_parallel, work, place, exact=exact, owners=owners)
        window = min(sizes.gradients, window_bytes(workers, shared=machines == 1))
        sums = window if windowed else sizes.gradients
        means = holders * sizes.gradients // workers if windowed else 0  # apart from the sums
        tensors = run(stage=stage, sharing=sharing, window=window, holders=holders)
        tensors += 0 if machines == 1 else sums * (workers - 1) // workers  # of the others
        yield judge("sharded", {"shard": shard}, program, tensors, first=known.first(sums + means, sharing))


def _servers(
    work: Work, place: Place, judge: _Judge, exact: bool, convergent: bool, tensors: Callable[..., int]
) -> Iterator[Candidate]:
    """Yield parameter servers: one for synchronous training, and one in each worker for asynchronous training.

    ``tensors`` returns the bytes of all-reduce. Asynchronous workers compute whole batches.
    """
    copies, sizes = min(_SERVERS.copies, len(place.machines)) - 1, judge.known.profile.sizes
    shard = work.parameter_bytes, sizes.optimizer
    owners = Updaters(_SERVERS.count, copies, whole=True)
    program = partial(data_parallel, work, place, exact=exact, owners=owners)
    shared = len(place.machines) == 1
    yield judge("parameter-server", {}, program, tensors() + of_servers(*shard, sizes.gradients, place.workers, shared))
    if convergent and not exact:
        servers = min(place.workers, sum(one.parameter_bytes > 0 for one in work.layers(1)))
        given = {"server": {"mode": "async", "count": servers}}
        held = 2 * (1 + copies) * sum(shard) // servers
        free = partial(asynchronous, work, place, servers=servers, copied=copies > 0)
        yield judge("parameter-server", given, free, tensors(even_shares=False) + held, waits=False)


def _pipelines(known: Measured, place: Place, judge: _Judge, stages: int) -> Iterator[Candidate]:
    """Yield pipelines cut where the stages take equally long, with the same number of workers for each stage."""
    work, workers, layers = known.work, place.workers, known.work.layers(1)
    if stages > len(layers):
        return
    each = workers // stages
    if each == 1 and len({*place.speeds}) > 1:
        bounds = fit_bounds([one.forward + one.backward for one in layers], [1 / speed for speed in place.speeds])
    else:
        rate = min(one.bytes_per_second for one in place.machines)
        bounds = balance(layers, stages, Cluster(rate, None, stages, -(-work.microbatches // each))).bounds
    names = [layers[begin].name for begin, _ in bounds[1:]]
    for kind in _SCHEDULES:
        settings = PipelineSettings(schedule=kind, cut=tuple(names))
        schedule = synchronous_schedule(settings, workers, work.microbatches)
        given = {"pipeline": {"schedule": kind, "cut": names}}
        program = partial(pipeline, work, place, schedule=schedule, bounds=bounds)
        sizes = known.profile.sizes
        of_stage = [sum(layer.parameter_bytes for layer in layers[slice(*bound)]) for bound in bounds]
        kept = [sum(layer.kept_bytes for layer in layers[slice(*bound)]) for bound in bounds]
        share = [one / max(work.parameter_bytes, 1) for one in of_stage]
        states = sizes.weights + sizes.gradients + sizes.optimizer
        needed = max(
            part * states + bytes_kept * min(stages - stage, -(-work.microbatches // each))
            for stage, (part, bytes_kept) in enumerate(zip(share, kept, strict=True))
        )
        yield judge("pipeline", given, program, int(needed), first=known.first(0))


@dataclass(frozen=True)
class _Judge:
    """Simulates candidates with some workers."""

    layout: Layout
    place: Place
    known: Measured

    def __call__(
        self,
        strategy: str,
        settings: Mapping[str, Any],
        program: Callable[[int, int], Program],
        tensor_bytes: int,
        period: int = 1,
        waits: bool = True,
        first: int | None = None,
    ) -> Candidate:
        """Simulate a candidate.

        Args:
            strategy: its name.
            settings: its settings.
            program: operations of each worker in each step.
            tensor_bytes: bytes of the tensors of a worker.
            period: number of steps after which the program repeats.
            waits: whether steps wait for other workers. Otherwise each worker makes steps of its own.
            first: bytes of tensors in the first step. Defaults to those of all-reduce.
        """
        workers, place = self.place.workers, self.place
        ends, waited = [], {}
        for steps in (period * count for count in _STEPS):
            simulation = Simulation(place.machines, place.of_worker)
            outcome = simulation.run({rank: _repeated(program, rank, steps) for rank in place.group})
            ends.append(outcome.ends)
            waited = {name: seconds / steps for name, seconds in outcome.waited[place.group[-1]].items()}
        made = period * (_STEPS[1] - _STEPS[0])
        if waits:
            seconds = (max(ends[1].values()) - max(ends[0].values())) / made
        else:
            seconds = 1 / sum(made / (ends[1][rank] - ends[0][rank]) for rank in ends[0])
        known = self.known
        kept = 0 if strategy == "sharded" else known.kept_bytes  # workers that divide their state keep none
        most = max(known.first_bytes if first is None else first, tensor_bytes + kept)
        memory_bytes = known.profile.process_bytes + most
        return Candidate(
            strategy,
            workers,
            settings,
            self.layout.name,
            seconds,
            seconds / (1 + self.known.spread),
            seconds * (1 + self.known.spread),
            memory_bytes,
            tensor_bytes,
            waited,
            memory_bytes <= self.layout.memory_bytes,
            len(place.machines),
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
    """Say which candidate is the first, and for each other strategy the time of its best one, and why.

    Args:
        ordered: the candidates, the best first.
        word: adjective for the first candidate.
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
    given = variant(one.settings)
    waiting = f" + {one.standbys} that waits" if one.standbys else ""
    rented = "" if one.bill is None else f" ({one.machines} {one.machine}{', spot' * one.spot}{waiting})"
    return f"{one.strategy}{f' ({given})' if given else ''} on {one.workers} worker{'s' * (one.workers > 1)}{rented}"


def variant(settings: Mapping[str, Any]) -> str:
    """Return the properties that distinguish a candidate from others of its strategy."""
    piped = settings.get("pipeline", {})
    stages = f"{len(piped['cut']) + 1} stages {piped['schedule']}" if piped else ""
    return settings.get("shard") or stages or settings.get("server", {}).get("mode", "")


def _takes(one: Candidate) -> str:
    step = f"{_time(one.step_seconds)} a step"
    if one.bill is None:
        return step
    return f"{one.time:.3g} h for {one.price:,.2f} {one.bill.currency}, {step}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
