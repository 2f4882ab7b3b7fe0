"""The strategies by name."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.config import check_strategy
from paceline.settings import Settings
from paceline.strategies.auto import Auto
from paceline.strategies.base import Strategy
from paceline.strategies.data_parallel.allreduce import AllReduce
from paceline.strategies.data_parallel.backup_workers import BackupWorkers
from paceline.strategies.data_parallel.local_sgd import LocalSgd
from paceline.strategies.data_parallel.work_stealing import WorkStealing
from paceline.strategies.parameter_server.hogwild import HogWild
from paceline.strategies.parameter_server.strategy import ParameterServer
from paceline.strategies.pipeline.strategy import Pipeline
from paceline.strategies.single import Single

STRATEGIES: dict[str, type[Strategy]] = {
    "allreduce": AllReduce,
    "auto": Auto,
    "backup": BackupWorkers,
    "hogwild": HogWild,
    "local-sgd": LocalSgd,
    "parameter-server": ParameterServer,
    "pipeline": Pipeline,
    "single": Single,
    "stealing": WorkStealing,
}


def strategy_named(name: str) -> type[Strategy]:
    """The strategy of that name.

    Raises:
        ConfigError: there is none.
    """
    check_strategy(name)
    return STRATEGIES[name]


def strategy_for(name: str, workers: int) -> type[Strategy]:
    """The strategy at work; for one worker, who has nobody to train with, the reference does the same."""
    return strategy_named(name) if workers > 1 else strategy_named(name).alone or Single


def fitting(settings: Settings, microbatches: int, largest: int) -> list[int]:
    """With how many workers, ``largest`` at most, training can go on; empty if with any number of them."""
    strategy = strategy_named(settings.strategy)
    every = range(1, largest + 1)
    found = [count for count in every if count == 1 or strategy.fits(settings, count, microbatches)]
    return [] if len(found) == len(every) else found


def unread(settings: Settings, given: Iterable[str]) -> list[str]:
    """The keys among these that the strategy at work does not read, while other strategies do."""
    own = strategy_named(settings.strategy)
    some = {key for strategy in STRATEGIES.values() for key in strategy.reads}
    return [
        key
        for key in given
        if not some.isdisjoint(_names(key)) and (set(own.reads).isdisjoint(_names(key)) or key in own.ignores(settings))
    ]


def _names(key: str) -> tuple[str, str]:
    """How ``Strategy.reads`` may name a key: by itself, or by its group."""
    return key, key.partition(".")[0]
