"""The strategies by name, and the one that the settings and the number of workers choose."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from paceline.config import check_strategy
from paceline.data.order import BatchOrder
from paceline.errors import InputError
from paceline.settings import Settings
from paceline.step.job import Job
from paceline.step.optimizers.own_values import check_own_tensors
from paceline.step.trials.optimizer_probe import probe_optimizer
from paceline.strategies import auto, single
from paceline.strategies.base import Capabilities, Strategy, check_shares
from paceline.strategies.data_parallel import allreduce, backup_workers, local_sgd, work_stealing
from paceline.strategies.data_parallel.allreduce import AllReduce
from paceline.strategies.parameter_server import hogwild
from paceline.strategies.parameter_server import strategy as parameter_server
from paceline.strategies.parameter_server.last_worker import LastWorker
from paceline.strategies.phases import Phases
from paceline.strategies.pipeline import strategy as pipeline
from paceline.strategies.single import Single


def _every_capability(settings: Settings, workers: int) -> Capabilities:
    return Capabilities()


def _validate(settings: Settings, model: nn.Module, order: BatchOrder, workers: int, largest: int) -> None:
    check_shares(settings, order, workers, largest)


def _any_number(settings: Settings, workers: int, microbatches: int) -> bool:
    return True


@dataclass(frozen=True)
class Entry:
    """What the registry knows of a strategy.

    Attributes:
        build: makes it, for two workers or more.
        alone: makes what trains when a single worker is there, or left; by default the reference.
        capabilities: of (settings, workers).
        validate: refuses, before the workers meet, what cannot be trained: called with the settings, the model, the
            order of the samples, how many workers begin, and how many there may ever be. Raises ConfigError or
            InputError, which say what to do instead.
        supports: whether training can go on with so many workers, two or more, when some were lost or have joined:
            called with the settings, the workers, and the microbatches of a batch.
    """

    build: Callable[[Job], Strategy]
    alone: Callable[[Job], Strategy] = Single
    capabilities: Callable[[Settings, int], Capabilities] = _every_capability
    validate: Callable[[Settings, nn.Module, BatchOrder, int, int], None] = _validate
    supports: Callable[[Settings, int, int], bool] = _any_number


_ENTRIES: dict[str, Entry] = {
    "allreduce": Entry(AllReduce, capabilities=allreduce.capabilities),
    "auto": Entry(auto.Auto, capabilities=auto.capabilities),
    "backup": Entry(
        backup_workers.build,
        alone=backup_workers.build_alone,
        capabilities=backup_workers.capabilities,
        validate=backup_workers.validate,
    ),
    "hogwild": Entry(hogwild.build, alone=LastWorker, capabilities=hogwild.capabilities),
    "local-sgd": Entry(local_sgd.LocalSgd, capabilities=local_sgd.capabilities),
    "parameter-server": Entry(
        parameter_server.build,
        alone=parameter_server.build_alone,
        capabilities=parameter_server.capabilities,
        validate=parameter_server.validate,
    ),
    "pipeline": Entry(
        pipeline.build,
        capabilities=pipeline.capabilities,
        validate=pipeline.validate,
        supports=pipeline.supports,
    ),
    "single": Entry(Single, capabilities=single.capabilities, validate=single.validate),
    "stealing": Entry(work_stealing.WorkStealing, capabilities=work_stealing.capabilities),
}


def register(name: str, entry: Entry) -> None:
    """Make a strategy known by a name; call this before ``paceline.start``, in every worker."""
    _ENTRIES[name] = entry


def names() -> list[str]:
    """The names of all strategies."""
    return sorted(_ENTRIES)


def entry_of(name: str) -> Entry:
    """The strategy of that name.

    Raises:
        ConfigError: there is none.
    """
    check_strategy(name, names())
    return _ENTRIES[name]


def build(job: Job) -> Strategy:
    """The strategy at work for the settings and the workers of a job."""
    entry = entry_of(job.settings.strategy)
    job.warnings.clear()
    make = entry.build if job.world.size > 1 else entry.alone
    return Phases(job, make) if job.phases else make(job)


def capabilities(settings: Settings, workers: int) -> Capabilities:
    """What the strategy that is set can do."""
    return entry_of(settings.strategy).capabilities(settings, workers)


def worker_counts(settings: Settings, microbatches: int, largest: int) -> list[int]:
    """With how many workers, ``largest`` at most, training can go on; empty if with any number of them."""
    entry = entry_of(settings.strategy)
    every = range(1, largest + 1)
    found = [count for count in every if count == 1 or entry.supports(settings, count, microbatches)]
    return [] if len(found) == len(every) else found


def check_optimizer(job: Job, able: Capabilities) -> None:
    """Refuse an optimizer that needs all updates where not every worker makes all of them.

    Raises:
        InputError: says why.
    """
    strategy = job.settings.strategy
    if not able.makes_all_updates:
        check_own_tensors(job.update.optimizer, dict(job.compute.model.named_parameters()), strategy)
        if not able.cuts_model:
            job.update.divided_by = strategy
    if job.divides_update:
        probe_optimizer(job)


def without_effect(settings: Settings, keys: Iterable[str]) -> list[str]:
    """The keys among these that the strategy that is set does not read, while another does."""
    own = capabilities(settings, 1)
    some = {key for entry in _ENTRIES.values() for key in entry.capabilities(settings, 1).reads}
    return [
        key
        for key in keys
        if not some.isdisjoint(_spellings(key)) and (set(own.reads).isdisjoint(_spellings(key)) or key in own.ignores)
    ]


def without_audits(settings: Settings, workers: int, keys: Iterable[str]) -> str:
    """What to say of a strategy that does not audit with so many workers; empty if it does, or nobody wants it to.

    Args:
        settings: of the run.
        workers: how many there are.
        keys: of the settings that were given.
    """
    able = capabilities(settings, workers)
    if able.audits or settings.audit == "off":
        return ""
    what = f"backup.workers = {settings.backup.workers}" if settings.backup.workers else f"{workers} workers"
    looked = "only the trials before the first step look" if able.replicated else "nothing looks"
    asked = "audit is set, but without effect: " if "audit" in keys else ""
    return (
        f"{asked}strategy {settings.strategy!r} has no audits with {what}: {looked} whether a microbatch depends on "
        f"who computes it. Train some steps with strategy 'allreduce' or 'single' first, which have audits"
    )


def _spellings(key: str) -> tuple[str, str]:
    """How ``Capabilities.reads`` may name a key: by itself, or by its group."""
    return key, key.partition(".")[0]


def check_loop_changes(settings: Settings, workers: int, parameter: str, step: int) -> None:
    """Refuse weights changed by the loop where a worker does not hold those that are trained.

    Args:
        settings: of the run.
        workers: how many there are.
        parameter: one that the loop has changed; empty if there is none.
        step: before which it has.

    Raises:
        InputError: names the parameter.
    """
    if parameter and not capabilities(settings, workers).loop_weights:
        raise InputError(
            f"The loop has changed the parameter {parameter!r} before step {step}. With strategy {settings.strategy!r} "
            f"a worker does not hold the weights that are trained, so the change would be lost, or made several "
            f"times. Use strategy 'allreduce' or 'stealing'; average='ema' keeps an average of the weights."
        )
