"""Registry of strategies by name, and the choice of a strategy by settings and number of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from torch import nn

from paceline.checkpoint.load import Shares
from paceline.checkpoint.weights.deferred.model import materialize
from paceline.config import check_strategy
from paceline.data.order import BatchOrder
from paceline.errors import InputError
from paceline.partition.flags import requires_grad_flags
from paceline.settings import Settings
from paceline.step.checks import Sparse
from paceline.step.context import TrainingContext
from paceline.step.optimizers.overlap import check_apart
from paceline.step.optimizers.own_values import check_own_tensors
from paceline.step.probes.optimizer_probe import probe_optimizer
from paceline.step.probes.row_probe import probe_rows
from paceline.strategies import auto, single
from paceline.strategies.base import Capabilities, Strategy, check_shares, sparse_if_plain
from paceline.strategies.batch_losses import BatchLosses
from paceline.strategies.data_parallel import allreduce, backup_workers, work_stealing
from paceline.strategies.data_parallel.allreduce import AllReduce
from paceline.strategies.data_parallel.communication import ChosenCommunication
from paceline.strategies.local import strategy as local
from paceline.strategies.parameter_server import hogwild, table_servers
from paceline.strategies.parameter_server import strategy as parameter_server
from paceline.strategies.parameter_server.final_drain import FinalDrain
from paceline.strategies.phases import Phases
from paceline.strategies.pipeline import strategy as pipeline
from paceline.strategies.sharded import strategy as sharded
from paceline.strategies.sharded.prepared import forget
from paceline.strategies.sharded.prepared import prepare as prepare_shards
from paceline.strategies.single import Single
from paceline.system.wires import ADAPTIVE


def _validate(settings: Settings, model: nn.Module, order: BatchOrder, workers: int, largest: int) -> None:
    check_shares(settings, order, workers, largest)


@dataclass(frozen=True)
class Entry:
    """Registry entry of a strategy.

    Attributes:
        build: function that builds the strategy for two or more workers.
        alone: function that builds the strategy for a single worker. Defaults to the reference, :class:`Single`.
        capabilities: function of the settings and the number of workers.
        prepare: divides the state before a checkpoint is loaded, so that each worker reads its share, if there is a
            capability ``divides_state``. None if each reads all.
        validate: check before the rendezvous that the run can be trained. Called with the settings, the model, the
            batch order, the number of workers at the start and the largest possible number. Raises ConfigError or
            InputError, which say what to do instead.
        supports: whether training can continue with a number of workers, two or more, after a loss or a join. Called
            with the settings, the number of workers and the number of microbatches of a batch.
        tables: entry for models with sparse gradients. None if it is the same.
    """

    build: Callable[[TrainingContext], Strategy]
    alone: Callable[[TrainingContext], Strategy] = Single
    capabilities: Callable[[Settings, int], Capabilities] = lambda *_: Capabilities()
    prepare: Callable[[TrainingContext, bool], Shares] | None = None
    validate: Callable[[Settings, nn.Module, BatchOrder, int, int], None] = _validate
    supports: Callable[[Settings, int, int], bool] = lambda *_: True
    tables: Entry | None = None


_LOCAL = Entry(local.build, alone=local.build, capabilities=local.capabilities, validate=local.validate)
_ENTRIES: dict[str, Entry] = {
    "allreduce": Entry(AllReduce, capabilities=allreduce.capabilities),
    "auto": Entry(auto.Auto, capabilities=work_stealing.capabilities),
    "backup": Entry(
        backup_workers.build,
        alone=backup_workers.build_alone,
        capabilities=backup_workers.capabilities,
        validate=backup_workers.validate,
    ),
    "hogwild": Entry(hogwild.build, alone=FinalDrain, capabilities=hogwild.capabilities),
    "diloco": _LOCAL,
    "local-sgd": _LOCAL,
    "parameter-server": Entry(
        parameter_server.build,
        alone=parameter_server.build_alone,
        capabilities=parameter_server.capabilities,
        validate=parameter_server.validate,
        tables=Entry(
            table_servers.build,
            alone=parameter_server.build_alone,
            capabilities=table_servers.capabilities,
            prepare=table_servers.prepare,
            validate=table_servers.validate,
        ),
    ),
    "pipeline": Entry(
        pipeline.build, capabilities=pipeline.capabilities, validate=pipeline.validate, supports=pipeline.supports
    ),
    "sharded": Entry(
        sharded.Sharded, capabilities=sharded.capabilities, prepare=prepare_shards, validate=sharded.validate
    ),
    "single": Entry(Single, capabilities=single.capabilities, validate=single.validate),
    "stealing": Entry(work_stealing.WorkStealing, capabilities=work_stealing.capabilities),
}


def register(name: str, entry: Entry) -> None:
    """Register a strategy under a name. Call this before ``paceline.start`` in every worker."""
    _ENTRIES[name] = entry


def names() -> list[str]:
    return sorted(_ENTRIES)


def entry_of(name: str, tables: bool = False) -> Entry:
    """Return the registry entry of a strategy. Raises ConfigError if no strategy has that name.

    Args:
        tables: whether the model has sparse gradients.
    """
    check_strategy(name, names())
    entry = _ENTRIES[name]
    return (entry.tables or entry) if tables else entry


def _entry(context: TrainingContext) -> Entry:
    return entry_of(context.settings.strategy, bool(context.sparse))


def build(context: TrainingContext) -> Strategy:
    """Build the strategy for a context, one strategy per phase if a batch has several losses.

    With a loss over the whole batch, it begins with a first pass over all microbatches.
    """
    entry = _entry(context)
    context.warnings.clear()
    if context.world.size == 1:
        materialize(context.compute.model)
    build_one = entry.build if context.world.size > 1 else entry.alone
    chooses = context.settings.communication != "fixed" or ADAPTIVE in context.settings.wires.values()
    able = entry.capabilities
    make = partial(ChosenCommunication, make=build_one, capabilities=able) if chooses else build_one
    if context.compute.batch_loss is not None:
        return BatchLosses(context, make)
    return Phases(context, make) if context.phases else make(context)


def prepare(context: TrainingContext, moves: bool = False) -> Shares | None:
    """Return the division of the state for loading a checkpoint, or None if each worker reads all of it.

    All workers call this together, after the rendezvous and before :func:`build`.

    Args:
        moves: whether the workers hold the state in other shares, which they move.
    """
    forget(context)
    entry = _entry(context)
    if entry.prepare is None or not divides_state(context) or context.world.size == 1:
        return None
    trained = requires_grad_flags(context.update.parameters.values())
    with trained.set_to((True,) * len(context.update.parameters)):  # each may be trained at some later step
        return entry.prepare(context, moves)


def divides_state(context: TrainingContext) -> bool:
    """Return whether several workers would load and hold the state in shares."""
    entry = _entry(context)
    return entry.prepare is not None and entry.capabilities(context.settings, 2).divides_state > 0


def capabilities(settings: Settings, workers: int, tables: bool = False) -> Capabilities:
    """Return the capabilities of the configured strategy; ``tables``: see :func:`entry_of`."""
    return entry_of(settings.strategy, tables).capabilities(settings, workers)


def sparse_gradients(settings: Settings, workers: int) -> Sparse:
    """Return which gradients may be sparse. In one process any may, unless gradients have a format."""
    if workers == 1 and sparse_if_plain(settings) == "modules":
        return "any"
    return capabilities(settings, workers).sparse_gradients


def capabilities_here(context: TrainingContext) -> Capabilities:
    """Return the capabilities of the strategy with the workers and the model of a context."""
    return _entry(context).capabilities(context.settings, context.world.size)


def lanes_of(context: TrainingContext) -> int:
    """Return the number of lanes that the workers hold: replicas of the model, or errors of microbatches."""
    settings = context.settings
    return context.order.microbatches if settings.keeps_errors else capabilities_here(context).replicas


def worker_counts(settings: Settings, microbatches: int, largest: int) -> list[int]:
    """Return the numbers of workers up to ``largest`` with which training can continue; empty if it can with all."""
    entry = entry_of(settings.strategy)
    every = range(1, largest + 1)
    found = [count for count in every if count == 1 or entry.supports(settings, count, microbatches)]
    return [] if len(found) == len(every) else found


def check_optimizer(context: TrainingContext, able: Capabilities) -> None:
    """Raise if the optimizer needs all updates but not every worker makes all of them.

    Raises:
        InputError: the optimizer keeps tensors of its own, or its update of a parameter depends on other parameters.
    """
    strategy = context.settings.strategy
    if not able.replicated:
        check_own_tensors(context.update.optimizer, dict(context.compute.model.named_parameters()), strategy)
        if not able.cuts_model:
            context.update.divided_by = strategy
    if context.divides_update:
        check_apart(context.update.parameters, strategy)
        probe_optimizer(context)
    if able.sparse_gradients == "modules":
        probe_rows(context)


def check_saving(strategy: Strategy) -> None:
    """Raise InputError if the state between two steps cannot be saved now."""
    if why := strategy.why_unsaved:
        raise InputError(why)


def without_effect(settings: Settings, keys: Iterable[str]) -> list[str]:
    """Return the given keys that another strategy reads but that have no effect on the configured strategy."""
    own = capabilities(settings, 1)
    some = {key for entry in _ENTRIES.values() for key in entry.capabilities(settings, 1).reads}
    return [
        key
        for key in keys
        if not some.isdisjoint(_spellings(key)) and (set(own.reads).isdisjoint(_spellings(key)) or key in own.ignores)
    ]


def without_audits(settings: Settings, workers: int, keys: Iterable[str], tables: bool = False) -> str:
    """Return a warning if the strategy has no audits with this number of workers, unless audits are turned off.

    Args:
        keys: keys of the settings that were set explicitly.
        tables: see :func:`entry_of`.
    """
    able = capabilities(settings, workers, tables)
    if able.audits or settings.audit == "off":
        return ""
    what = f"backup.workers = {settings.backup.workers}" if settings.backup.workers else f"{workers} workers"
    looked = "only the probes before the first step look" if able.replicated else "nothing looks"
    asked = "audit is set, but without effect: " if "audit" in keys else ""
    return (
        f"{asked}strategy {settings.strategy!r} has no audits with {what}: {looked} whether a microbatch depends on "
        f"who computes it. Train some steps with strategy 'allreduce' or 'single' first, which have audits"
    )


def _spellings(key: str) -> tuple[str, str]:
    """Return the names by which ``Capabilities.reads`` may list a key: the key itself, or its group."""
    return key, key.partition(".")[0]


def check_loop_changes(settings: Settings, workers: int, parameter: str, step: int) -> None:
    """Raise InputError if the loop has changed weights although workers do not hold the weights that are trained.

    Args:
        parameter: name of a parameter that the loop has changed. Empty if it changed none.
    """
    if parameter and not capabilities(settings, workers).loop_weights:
        raise InputError(
            f"The loop has changed the parameter {parameter!r} before step {step}. With strategy {settings.strategy!r} "
            f"and these settings, the weights that the loop sees are not the ones that the next step trains, so the "
            f"change would be lost, or made several times. Use strategy 'allreduce' or 'stealing'; average='ema' keeps "
            f"an average of the weights."
        )
