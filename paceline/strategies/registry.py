"""The strategies by name."""

from __future__ import annotations

import difflib

from paceline.errors import ConfigError
from paceline.strategies.allreduce import AllReduce
from paceline.strategies.base import Strategy
from paceline.strategies.single import Single

STRATEGIES: dict[str, type[Strategy]] = {"allreduce": AllReduce, "single": Single}


def strategy_named(name: str, workers: int) -> type[Strategy]:
    """The strategy of that name; for one worker, who has nobody to average with, the reference does the same.

    Raises:
        ConfigError: there is none, or it is not for so many workers.
    """
    if name not in STRATEGIES:
        near = difflib.get_close_matches(name, STRATEGIES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"There is no strategy {name!r}.{hint} The strategies are: {', '.join(sorted(STRATEGIES))}.")
    if name == "single" and workers > 1:
        raise ConfigError(f"strategy 'single' is for one process, but there are {workers} workers: use 'allreduce'.")
    return Single if workers == 1 else STRATEGIES[name]
