"""Request for a plan: the options of ``paceline plan``, and its answer."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from paceline import config
from paceline.errors import ConfigError
from paceline.launchers.base import Request
from paceline.launchers.prepare import check
from paceline.planning.costs import Profile
from paceline.planning.offers import Market, chosen, type_of, within
from paceline.planning.renting.interruptions import read_trace
from paceline.planning.renting.machines import builtin
from paceline.planning.search import Candidate, best, candidates
from paceline.planning.trials import Start, layout_of, measure


@dataclass(frozen=True)
class Query:
    """What to plan for. The fields are the arguments of ``paceline.plan``."""

    workers: int
    link: Sequence[float]  # of all machines, or of each
    speeds: Sequence[float]
    latency: float
    memory: float | None
    steps: int | None
    epochs: float | None
    tolerance: str
    machines: str | None
    here: str | None
    spot: bool
    trace: Path | None
    deadline: str | None
    budget: float | None

    def __post_init__(self) -> None:
        given = {name: (getattr(self, name),) for name in ("workers", "memory", "steps", "epochs", "budget")}
        for option, values in {**given, "link": self.link, "speeds": self.speeds}.items():
            for value in values:
                if value is not None and not 0 < value < math.inf and (option, value) != ("workers", 0):
                    raise ConfigError(f"{option} {value}: give a finite number above 0.")
        self._check_each()
        if not 0 <= self.latency < math.inf:
            raise ConfigError(f"latency {self.latency}: give milliseconds, 0 or more.")
        if self.tolerance not in ("bits", "rounding", "convergent"):
            raise ConfigError(f"tolerance {self.tolerance}: give bits, rounding or convergent.")
        if self.steps is not None and self.epochs is not None:
            raise ConfigError("steps and epochs both say how long training takes: give one of them.")
        self._check_machines()

    def _check_each(self) -> None:
        """Check that all arguments with a value for each machine have the same number of machines."""
        if self.speeds and not self.link:
            raise ConfigError("speeds are those of machines with a worker each: give their link, too.")
        each = {name: len(values) for name, values in (("link", self.link), ("speeds", self.speeds)) if len(values) > 1}
        if self.workers and each:
            each["workers"] = self.workers
        if len({*each.values()}) > 1:
            told = ", ".join(f"{name} of {count}" for name, count in each.items())
            raise ConfigError(f"The numbers of machines differ: {told}. Give a value for each machine, or one for all.")

    def _check_machines(self) -> None:
        """Check the arguments about machines to rent, before any measurement."""
        about = [
            name for name in ("here", "spot", "trace", "deadline", "budget") if getattr(self, name) not in (None, False)
        ]
        if self.machines is None:
            if about:
                raise ConfigError(f"{about[0]} is for machines to rent: give their types as machines.")
            return
        if self.steps is None and self.epochs is None:
            raise ConfigError("machines: hours and money depend on the length of the training. Give steps or epochs.")
        for option in ("link", "memory"):
            if getattr(self, option):
                raise ConfigError(f"{option} and machines both say what the machines have: give one of them.")
        _ = self.market, self.hours

    @cached_property
    def market(self) -> Market | None:
        """Machines to rent."""
        if self.machines is None:
            return None
        kinds = chosen(self.machines)
        known = {**builtin(), **{kind.name: kind for kind in kinds}}
        here = None if self.here is None else type_of(self.here, known, "here")
        trace = None if self.trace is None else read_trace(self.trace)
        return Market(kinds, here, self.spot or self.trace is not None, trace)

    @property
    def hours(self) -> float:
        """Hours until the deadline."""
        if self.deadline is None:
            return math.inf
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([mhd])", self.deadline)
        if found is None or not float(found[1]):
            raise ConfigError(f"deadline {self.deadline}: give a time such as 90m, 24h or 3d.")
        return float(found[1]) * {"m": 1 / 60, "h": 1, "d": 24}[found[2]]

    @property
    def word(self) -> str:
        """What the first plan is."""
        return "fastest" if self.market is None or self.budget is not None else "cheapest"

    def candidates(self, base: Request, start: Start) -> tuple[Profile, int | None, list[Candidate], list[Candidate]]:
        """Measure a script, and simulate the possible plans.

        Returns:
            the profile with one worker, the number of steps, the candidates, the best first, and those that do not fit
            into the memory.
        """
        exact = self.tolerance == "bits"
        if exact:
            base = replace(base, settings={**base.settings, "exact": "true"})
        check(base)
        cores = os.cpu_count() or 1
        each = max(len(self.link), len(self.speeds))
        most = self.workers or (each if each > 1 else cores)
        counts = _powers(min(most, 2 if self.link else cores))
        measured = measure(base, counts, cores, start, self._steps)
        profile = measured[1].profile
        total, convergent = self._steps(profile), self.tolerance == "convergent"
        if self.market is not None:
            assert total is not None
            every = config.parse_value(base.settings.get("checkpoint.every", "none"))
            saved = every if isinstance(every, int) else None
            found = self.market.offers(measured, self.workers or None, total, profile.exact, convergent, saved)
            budget = math.inf if self.budget is None else self.budget
            kept = within([*found], self.hours, budget)
        else:
            layout = layout_of(cores, most, self.link, self.latency, self.memory, self.speeds)
            kept = [*candidates(measured, layout, _powers(most), profile.exact, convergent)]
        if exact:
            kept = [replace(one, settings={"exact": True, **one.settings}) for one in kept]
        return profile, total, best(kept, self.word == "cheapest"), [one for one in kept if not one.fits]

    def _steps(self, profile: Profile) -> int | None:
        if self.epochs is None:
            return self.steps
        if profile.steps_per_epoch is None:
            raise ConfigError("epochs: the data are a stream, whose length is unknown. Give steps instead.")
        return math.ceil(self.epochs * profile.steps_per_epoch)


def _powers(most: int) -> list[int]:
    """Return the powers of two up to a number, and the number."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]
