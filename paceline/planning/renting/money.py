"""Hours, money and energy of training on rented machines."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.planning.renting.failures import Expected, Spread
from paceline.planning.renting.machines import MachineType


@dataclass(frozen=True)
class Bill:
    """What training takes. The interval of a value holds 90 % of the histories."""

    hours: Spread  # from the request of the machines to the last step
    machine_hours: Spread  # billed hours of all machines
    money: Spread  # price of these
    currency: str  # currency of the money
    kilowatt_hours: Spread | None  # energy of the machines. None if their power is unknown.


def undisturbed(kind: MachineType, machines: int, seconds: float) -> Bill:
    """Return the bill of training for ``seconds`` without an interruption.

    >>> small = MachineType("small", cores=4, price_per_hour=2.0, minimum_seconds=3600.0, start_up_seconds=60.0)
    >>> undisturbed(small, machines=3, seconds=600).money
    Spread(mean=6.0, low=6.0, high=6.0)

    Raises:
        ConfigError: the type has no price.
    """
    return _bill(kind, False, [(seconds, machines * seconds, machines, machines)])


def interrupted(kind: MachineType, expected: Expected) -> Bill:
    """Return the bill of training with interruptions, with an interval.

    A replacement is billed while it starts, and not while the provider has none.

    Raises:
        ConfigError: the type has no spot price.
    """
    machines = expected.job.machines + expected.job.standbys
    runs = [(one.seconds, one.machine_seconds, machines, machines + one.interruptions) for one in expected.histories]
    return _bill(kind, True, runs)


def _bill(kind: MachineType, spot: bool, runs: list[tuple[float, float, int, int]]) -> Bill:
    """Return the bill of runs, each with its seconds, the seconds of all machines, their number, and their starts."""
    price = kind.needs("spot_price_per_hour" if spot else "price_per_hour", "a plan on rented machines needs")
    hours = Spread.of([(kind.start_up_seconds + seconds) / 3600 for seconds, *_ in runs])
    billed = [
        max(held + machines * kind.start_up_seconds, starts * kind.minimum_seconds) / 3600
        for _, held, machines, starts in runs
    ]
    return Bill(
        hours,
        Spread.of(billed),
        Spread.of([math.inf if math.isinf(one) else price * one for one in billed]),
        kind.currency,
        None if kind.watts is None else Spread.of([kind.watts / 1000 * one for one in billed]),
    )


def check_currency(kinds: Iterable[MachineType]) -> None:
    """Check that all prices are in one currency.

    Raises:
        ConfigError: there are several currencies.
    """
    named: dict[str, str] = {}
    for one in kinds:
        named.setdefault(one.currency, one.name)
    if len(named) > 1:
        (currency, name), (other, other_name), *_ = named.items()
        raise ConfigError(
            f"Prices cannot be compared in two currencies: {name!r} is in {currency}, {other_name!r} in {other}. Give "
            f"all prices in one currency."
        )
