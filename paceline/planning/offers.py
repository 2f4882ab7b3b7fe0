"""Plans on rented machines: candidates on each type, with hours, money and energy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import ConfigError
from paceline.planning.costs import Profile
from paceline.planning.renting.failures import Job, best_checkpoint_interval, replay
from paceline.planning.renting.interruptions import Exponential, Interruptions
from paceline.planning.renting.machines import MachineType, Rate, builtin, read, scale
from paceline.planning.renting.money import check_currency, interrupted, undisturbed
from paceline.planning.search import Candidate, Layout, Measured, candidates, named
from paceline.planning.simulate import Machine
from paceline.planning.trials import REACHED, SHARED

_HISTORIES = 100
_BANDWIDTH = "memory_bytes_per_second"
_LEAST_INTERVAL = 60.0
"""Shortest time between two checkpoints that is worth it, in seconds."""
_RECOVERY_SECONDS = 1.0
"""Time that the others wait when a worker is lost or joins (``bench/chaos.py``)."""
_STANDBYS = 0, 1
"""Numbers of machines that wait for another one to be lost."""
_STATE_BYTES_PER_SECOND = 1e9
"""Speed with which a worker copies its state for a save, or loads a checkpoint."""


@dataclass(frozen=True)
class Market:
    """Machines to choose from.

    Raises:
        ConfigError: a type lacks a value that is needed, or prices have several currencies.
    """

    kinds: Sequence[MachineType]  # their types
    # type of the machine on which the script is measured. None: as the types without GPUs.
    here: MachineType | None = None
    spot: bool = False  # whether machines that the provider may take away are offered, too
    interruptions: Interruptions | None = None  # how all types lose machines. None: each type at its own rate.

    def __post_init__(self) -> None:
        rented = self.rented
        check_currency(rented)
        for kind in rented:
            kind.needs("network_bytes_per_second", "a plan on rented machines needs")
            if kind.gpus and self.here is None:
                raise ConfigError(
                    f"Machine type {kind.name!r} has GPUs, and times are scaled to them from those of a known type: "
                    f"name that of this machine as here."
                )
            if self.here is not None and self._scales(kind):
                scale((), self.here, kind)
            if self.spot and kind.spot_price_per_hour is not None:
                self._losses(kind)
        if self.spot and all(kind.spot_price_per_hour is None for kind in rented):
            rented[0].needs("spot_price_per_hour", "spot needs")

    @property
    def rented(self) -> list[MachineType]:
        """Types that are offered. A type without a price only describes this machine.

        Raises:
            ConfigError: no type has a price.
        """
        found = [kind for kind in self.kinds if kind.price_per_hour is not None]
        if not found:
            self.kinds[0].needs("price_per_hour", "a plan on rented machines needs")
        return found

    def offers(
        self,
        measured: Mapping[int, Measured],
        most: int | None,
        steps: int,
        exact: bool,
        convergent: bool,
        every: int | None = None,
    ) -> Iterator[Candidate]:
        """Yield the candidates for training on each type.

        Args:
            measured: measurements here, by the number of workers that computed at the same time.
            most: largest number of workers. None: those of 8 machines.
            steps: steps of the whole training.
            exact: see :func:`~paceline.planning.search.candidates`.
            convergent: see there.
            every: steps between two saves on spot machines. None: the interval that costs least.
        """
        if self.spot:  # an elastic run keeps a copy of each slice
            measured = {count: replace(one, profile=_elastic(one.profile)) for count, one in measured.items()}
        for kind in self.rented:
            layout = _layout(kind)
            alike = {1: measured[1]} if kind.gpus else measured  # a worker shares a GPU with no other
            known = {count: self._scaled(one, kind) for count, one in alike.items()}
            if kind.gpus:  # the memory is that of the GPU, which has no process
                profile = replace(known[1].profile, process_bytes=0)
                known = {1: replace(known[1], profile=profile, first_bytes=0, kept_bytes=0)}
            counts = _counts(layout.per_machine, min(most or 8 * layout.per_machine, measured[1].profile.microbatches))
            for one in candidates(known, layout, counts, exact, convergent):
                yield replace(one, bill=undisturbed(kind, one.machines, steps * one.step_seconds))
                if self.spot and kind.spot_price_per_hour is not None:
                    holders = measured[1].profile.holders(one.machines, one.workers)
                    held = {"allreduce": one.machines, "pipeline": 1, "sharded": holders}.get(one.strategy, 2)
                    for standbys in _STANDBYS:
                        yield self._interrupted(one, kind, _job(one, kind, steps, held, standbys), every)

    def _interrupted(self, one: Candidate, kind: MachineType, job: Job, every: int | None) -> Candidate:
        """Return a candidate on spot machines, with the interval between checkpoints that costs least."""
        losses, settings = self._losses(kind), dict(one.settings)
        if every is not None:
            job = replace(job, interval_seconds=every * one.step_seconds)
        else:
            job = replace(job, interval_seconds=max(_LEAST_INTERVAL, best_checkpoint_interval(job, losses)))
            if not math.isinf(job.interval_seconds):
                settings["checkpoint"] = {"every": max(1, round(job.interval_seconds / one.step_seconds))}
        bill = interrupted(kind, replay(job, losses, _HISTORIES))
        return replace(one, settings=settings, spot=True, standbys=job.standbys, bill=bill)

    def _losses(self, kind: MachineType) -> Interruptions:
        if self.interruptions is not None:
            return self.interruptions
        return Exponential(kind.needs("interruptions_per_hour", "spot without trace needs"))

    def _scales(self, kind: MachineType) -> bool:
        return self.here is not None and self.here.name != kind.name

    def _scaled(self, one: Measured, kind: MachineType) -> Measured:
        """Return the measurements, scaled to a type."""
        if self.here is None or not self._scales(kind):
            return one
        work = one.work
        here, there = (_of_worker(machine, work.core_load) for machine in (self.here, kind))
        purpose = f"scaling times from {here.name!r} to {there.name!r} needs"
        moving = here.needs(_BANDWIDTH, purpose) / there.needs(_BANDWIDTH, purpose)
        rate = _rate(one.profile)
        passes = {count: scale(layers, here, there, rate).layers for count, layers in work.passes.items()}
        return replace(one, work=replace(work, passes=passes, update=moving * work.update, add=moving * work.add))

    def extrapolated(self, profile: Profile) -> list[str]:
        """Say of each type whose times were not measured how they were found."""
        return [
            scale(profile.layers, self.here, kind, _rate(profile)).text
            for kind in self.rented
            if self.here and self._scales(kind)
        ]


def _elastic(profile: Profile) -> Profile:
    return replace(profile, shard_copy=profile.shard_copy is not False)


def _rate(profile: Profile) -> Rate:
    return "bfloat16_flops" if profile.autocast else "flops"


def _job(one: Candidate, kind: MachineType, steps: int, held: int, standbys: int) -> Job:
    """Return a candidate's training, as interrupted by failures; ``held``: workers that hold each part of its state."""
    loading, copies = one.tensor_bytes / _STATE_BYTES_PER_SECOND, min(held, one.machines)
    costs = _RECOVERY_SECONDS, loading, kind.start_up_seconds, loading
    return Job(steps, one.step_seconds, one.machines, copies, *costs, standbys=standbys)


def within(found: Sequence[Candidate], hours: float, money: float) -> list[Candidate]:
    """Return the candidates whose hours and money are within these limits in 95 % of the histories.

    Raises:
        ConfigError: there are none.
    """
    bills = [(one, one.bill) for one in found if one.fits and one.bill is not None]
    kept = [one for one, bill in bills if bill.hours.high <= hours and bill.money.high <= money]
    if kept or not bills:
        return kept or [*found]
    nearest, bill = min(bills, key=lambda pair: max(pair[1].hours.high / hours, pair[1].money.high / money))
    if math.isinf(bill.hours.high):
        raise ConfigError("Training never ends: machines are lost faster than it progresses. Take other machines.")
    limits = []
    if math.isfinite(hours):
        limits.append(f"ends within {hours:.3g} h")
    if math.isfinite(money):
        limits.append(f"costs at most {money:g} {bill.currency}")
    raise ConfigError(
        f"No candidate {' and '.join(limits)}. The nearest is {named(nearest)}: {bill.hours.high:.3g} h and "
        f"{bill.money.high:,.2f} {bill.currency}. Allow that, or give other machines, or more workers with -n."
    )


def chosen(text: str) -> list[MachineType]:
    """Return the types of a machines file (``.toml``), or those of the package with these names.

    >>> [kind.name for kind in chosen("g5.xlarge,p5.48xlarge")]
    ['g5.xlarge', 'p5.48xlarge']

    Raises:
        ConfigError: the file cannot be used, or a name is unknown.
    """
    if text.endswith(".toml"):
        return [*read(Path(text)).values()]
    known = builtin()
    found = {name: type_of(name, known, "machines") for name in map(str.strip, text.split(","))}
    return [*found.values()]


def type_of(name: str, known: Mapping[str, MachineType], option: str) -> MachineType:
    """Return the type with a name.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in known:
        raise ConfigError(f"{option} {name}: unknown type. Known are {', '.join(known)}; give others in a .toml file.")
    return known[name]


def _of_worker(kind: MachineType, core_load: float) -> MachineType:
    """Return a type with the FLOP rate and memory bandwidth of one worker: of its GPU, or of the cores it uses."""
    part = 1.0 if kind.gpus else min(1.0, (core_load or 1.0) / kind.cores)
    rates = {name: getattr(kind, name) for name in ("flops", "bfloat16_flops", _BANDWIDTH)}
    return replace(kind, **{name: part * rate for name, rate in rates.items() if rate is not None})


def _layout(kind: MachineType) -> Layout:
    """Return machines of a type, with a worker for each GPU, or each core if it has no GPU."""
    per_machine = kind.gpus or kind.cores
    rate = REACHED * kind.needs("network_bytes_per_second", "a plan on rented machines needs")
    if kind.gpus:
        memory = kind.gpu_memory_bytes
    else:
        memory = None if kind.memory_bytes is None else kind.memory_bytes / per_machine
    machine = Machine(kind.cores, rate, kind.network_latency, shared=1.0 if kind.gpus else SHARED)
    return Layout(machine, per_machine, math.inf if memory is None else memory, kind.name)


def _counts(per_machine: int, most: int) -> list[int]:
    """Return powers of two of the workers of one machine, of whole machines, and the largest number."""
    on_one = [1 << power for power in range(min(per_machine, most).bit_length())]
    on_many = [per_machine << power for power in range((most // per_machine).bit_length())]
    return sorted({count for count in (*on_one, *on_many, most) if count <= most})
