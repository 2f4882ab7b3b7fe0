"""Plans on rented machines: candidates on each type, with hours, money and energy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import ConfigError
from paceline.planning.renting.failures import Job, best_checkpoint_interval, replay
from paceline.planning.renting.interruptions import Exponential, Interruptions
from paceline.planning.renting.machines import MachineType, builtin, read, scale
from paceline.planning.renting.money import check_currency, interrupted, undisturbed
from paceline.planning.search import Candidate, Layout, Measured, candidates
from paceline.planning.simulate import Machine
from paceline.planning.trials import REACHED
from paceline.schedule.balance import LayerCost

_HISTORIES = 100
_RECOVERY_SECONDS = 1.0
"""Time that the others wait when a worker is lost or joins (``bench/chaos.py``)."""
_STATE_BYTES_PER_SECOND = 1e9
"""Speed with which a worker copies its state for a save, or loads a checkpoint."""


@dataclass(frozen=True)
class Market:
    """Machines to choose from.

    Attributes:
        kinds: their types.
        here: type of the machine on which the script is measured. None: as the types without GPUs.
        spot: whether machines that the provider may take away are offered, too.
        interruptions: how all types lose machines. None: each type at its own rate.

    Raises:
        ConfigError: a type lacks a value that is needed, or prices have several currencies.
    """

    kinds: Sequence[MachineType]
    here: MachineType | None = None
    spot: bool = False
    interruptions: Interruptions | None = None

    def __post_init__(self) -> None:
        check_currency(self.kinds)
        for kind in self.kinds:
            for name in ("price_per_hour", "network_bytes_per_second", *(["spot_price_per_hour"] if self.spot else [])):
                kind.needs(name, "a plan on rented machines needs")
            if kind.gpus and self.here is None:
                raise ConfigError(
                    f"Machine type {kind.name!r} has GPUs, and times are scaled to them from those of a known type: "
                    f"name that of this machine with --here."
                )
            if self._scales(kind):
                scale((), self.here or kind, kind)
            if self.spot:
                self._losses(kind)

    def offers(
        self, measured: Mapping[int, Measured], most: int | None, steps: int, exact: bool, convergent: bool
    ) -> Iterator[Candidate]:
        """Yield the candidates for training of so many steps on each type.

        Args:
            measured: what was measured here, by the number of workers that computed at the same time.
            most: largest number of workers. None: those of 8 machines.
            steps: steps of the whole training.
            exact: see :func:`~paceline.planning.search.candidates`.
            convergent: see there.
        """
        for kind in self.kinds:
            layout = _layout(kind)
            known = {count: self._scaled(one, kind) for count, one in measured.items()}
            counts = _counts(layout.per_machine, most or 8 * layout.per_machine)
            for one in candidates(known, layout, counts, exact, convergent):
                yield replace(one, bill=undisturbed(kind, one.machines, steps * one.step_seconds))
                if self.spot:
                    yield self._interrupted(one, kind, steps)

    def _interrupted(self, one: Candidate, kind: MachineType, steps: int) -> Candidate:
        """Return a candidate on spot machines, with the interval between checkpoints that costs least."""
        loading = one.memory_bytes / _STATE_BYTES_PER_SECOND
        copies = {"allreduce": one.machines, "pipeline": 1}.get(one.strategy, min(2, one.machines))
        job = Job(
            steps, one.step_seconds, one.machines, copies, _RECOVERY_SECONDS, loading, kind.start_up_seconds, loading
        )
        losses = self._losses(kind)
        job = replace(job, interval_seconds=best_checkpoint_interval(job, losses))
        settings = dict(one.settings)
        if not math.isinf(job.interval_seconds):
            settings["checkpoint"] = {"every": max(1, round(job.interval_seconds / one.step_seconds))}
        bill = interrupted(kind, replay(job, losses, _HISTORIES))
        return replace(one, settings=settings, spot=True, bill=bill)

    def _losses(self, kind: MachineType) -> Interruptions:
        if self.interruptions is not None:
            return self.interruptions
        return Exponential(kind.needs("interruptions_per_hour", "a plan with spot machines and no --trace needs"))

    def _scales(self, kind: MachineType) -> bool:
        return self.here is not None and self.here.name != kind.name

    def _scaled(self, one: Measured, kind: MachineType) -> Measured:
        """Return what was measured, scaled to a type."""
        if self.here is None or not self._scales(kind):
            return one
        work, here = one.work, self.here
        moving = here.needs("memory_bytes_per_second", "") / kind.needs("memory_bytes_per_second", "")
        passes = {count: scale(layers, here, kind).layers for count, layers in work.passes.items()}
        return replace(one, work=replace(work, passes=passes, update=moving * work.update, add=moving * work.add))

    def extrapolated(self, layers: Sequence[LayerCost]) -> list[str]:
        """Say of each type whose times were not measured how they were found."""
        return [scale(layers, self.here, kind).text for kind in self.kinds if self.here and self._scales(kind)]


def within(found: Sequence[Candidate], hours: float, money: float) -> list[Candidate]:
    """Return the candidates whose hours and money are within these limits in 95 % of the histories.

    Raises:
        ConfigError: there are none.
    """
    bills = [(one, one.bill) for one in found if one.fits and one.bill is not None]
    kept = [one for one, bill in bills if bill.hours.high <= hours and bill.money.high <= money]
    if kept or not bills:
        return kept or [*found]
    nearest, bill = min(bills, key=lambda one: max(one[1].hours.high / hours, one[1].money.high / money))
    limits = [f"within {hours:.3g} h"] * math.isfinite(hours) + [f"for {money:g} {bill.currency}"] * math.isfinite(
        money
    )
    raise ConfigError(
        f"Nothing ends {' '.join(limits)}. The nearest is {nearest.strategy} on {nearest.machines} {nearest.machine}"
        f"{', spot' * nearest.spot}, which may take {bill.hours.high:.3g} h and cost {bill.money.high:,.2f} "
        f"{bill.currency}. Allow that, or give other machines, or more workers with -n."
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
    return [named(one.strip(), known, "--machines") for one in text.split(",")]


def named(name: str, known: Mapping[str, MachineType], option: str) -> MachineType:
    """Return the type with a name.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in known:
        raise ConfigError(f"{option} {name}: unknown type. Known are {', '.join(known)}; give others in a .toml file.")
    return known[name]


def _layout(kind: MachineType) -> Layout:
    """Return machines of a type, with a worker for each GPU, or each core if it has no GPU."""
    per_machine = kind.gpus or kind.cores
    rate = REACHED * kind.needs("network_bytes_per_second", "a plan on rented machines needs")
    if kind.gpus:
        memory = kind.gpu_memory_bytes
    else:
        memory = None if kind.memory_bytes is None else kind.memory_bytes / per_machine
    machine = Machine(kind.cores, rate, kind.network_latency)
    return Layout(machine, per_machine, math.inf if memory is None else memory, kind.name)


def _counts(per_machine: int, most: int) -> list[int]:
    """Return powers of two, and whole machines of them: what fits on one machine, then 1, 2, 4, ... machines."""
    within = [1 << power for power in range(per_machine.bit_length()) if 1 << power < per_machine]
    beyond = [per_machine << power for power in range((most // per_machine).bit_length())]
    return [count for count in (*within, *beyond) if count <= most]
