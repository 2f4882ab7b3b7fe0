"""Parameter servers (Li et al. 2014, OSDI 11): workers pull weights, compute, push gradients; servers make the updates.

::

    sync       worker 0  ▓▓▓▓ push ┐        ┌ pull ▓▓▓▓         one update from all shares of a batch
               worker 1  ▓▓▓▓▓▓ push ┴ update ┴ pull ▓▓▓▓

    async      worker 0  pull ▓▓▓ push┬update pull ▓▓▓ push┬update       each batch is one worker's, and one update
               worker 1  pull ▓▓▓▓▓▓▓▓▓▓▓ push┬update pull ▓▓▓▓▓▓        at once (Dean et al. 2012)

    bounded    as async, but a worker starts round r only after all steps of the rounds up to r - s - 1 are applied
               (stale synchronous parallel: Ho et al. 2013, NIPS 26); a round is a step of each worker

The parameters are cut into ``server.count`` shards of whole tensors. With ``server.dedicated`` the first ranks are the
servers and compute nothing. Otherwise the worker that pushes a gradient makes the update itself. Other modules:
``sync_server`` (sync), ``async_server`` and ``dedicated_server`` (async and bounded), with the loop of ``async_steps``.
``table_servers`` is for models with sparse embeddings.
"""

from __future__ import annotations

from torch import nn

from paceline.data.order import BatchOrder
from paceline.errors import ConfigError
from paceline.settings import Settings
from paceline.step.context import TrainingContext
from paceline.strategies.base import Capabilities, Strategy, check_shares, sparse_if_plain
from paceline.strategies.data_parallel import backup_workers
from paceline.strategies.data_parallel.backup_workers import BackupWorkers
from paceline.strategies.parameter_server.async_server import InlineServer, servers_among
from paceline.strategies.parameter_server.async_steps import AsyncSteps
from paceline.strategies.parameter_server.dedicated_server import DedicatedServer
from paceline.strategies.parameter_server.final_drain import FinalDrain
from paceline.strategies.parameter_server.network_server import NetworkServer
from paceline.strategies.parameter_server.sharing import on_one_machine, over_network
from paceline.strategies.parameter_server.sync_server import SyncServer


def build(context: TrainingContext) -> Strategy:
    """Build the strategy of the configured mode."""
    if context.settings.server.mode == "sync":
        return SyncServer(context)
    if context.world.shared_memory is None or (context.sparse and context.settings.server.dedicated):
        remote = over_network(context)
        return AsyncSteps(remote, NetworkServer(remote))
    shared = on_one_machine(context, audited=not context.sparse)
    return AsyncSteps(shared, (DedicatedServer if context.settings.server.dedicated else InlineServer)(shared))


def build_alone(context: TrainingContext) -> Strategy:
    """Build the strategy of a single worker, which also completes the unfinished work of earlier workers."""
    return BackupWorkers(context) if context.settings.backup.workers else FinalDrain(context)


def capabilities(settings: Settings, workers: int) -> Capabilities:
    waits = settings.server.mode == "sync" and not settings.backup.workers
    return Capabilities(
        exact=waits,
        exact_with="server.mode = 'sync' without backup workers",
        replicated=False,
        sparse_gradients="none" if settings.backup.workers else sparse_if_plain(settings),
        divides_update=servers_among(settings, workers) > 1,
        carries=waits,
        audits=not settings.backup.workers,
        loop_weights=settings.server.mode == "sync",
        reads=("server", "backup"),
        ignores=() if settings.server.mode == "bounded" else ("server.staleness",),
    )


def validate(settings: Settings, model: nn.Module, order: BatchOrder, workers: int, largest: int) -> None:
    """Raise ConfigError if the servers do not fit the model or the workers, or if settings belong to another mode."""
    trained, server = sum(parameter.requires_grad for parameter in model.parameters()), settings.server
    if server.count > trained:
        raise ConfigError(
            f"server.count = {server.count} servers cannot share {trained} parameter"
            f"{'' if trained == 1 else 's'}: each holds whole ones. Use at most {trained}."
        )
    validate_servers(settings, model, order, workers, largest)


def validate_servers(settings: Settings, model: nn.Module, order: BatchOrder, workers: int, largest: int) -> None:
    """Raise ConfigError if the servers do not fit the workers, or if settings belong to another mode."""
    server = settings.server
    check_shares(settings, order, workers, largest)
    if settings.backup.workers:
        backup_workers.validate(settings, model, order, workers, largest)
        if server.mode != "sync" or server.dedicated:
            raise ConfigError(
                f"backup.workers = {settings.backup.workers} is for steps that wait for workers, at servers inside "
                f"them: use server.mode = 'sync' and server.dedicated = false, or leave it out."
            )
    if workers > 1 and server.count >= workers + (not server.dedicated):
        kind, most = ("dedicated servers", workers - 1) if server.dedicated else ("servers", workers)
        raise ConfigError(
            f"server.count = {server.count} {kind} need more than {workers} workers"
            f"{', of which some compute' if server.dedicated else ''}: use at most {most}, or more workers."
        )
    if server.mode == "sync" and (server.scale_lr or server.drop_after is not None):
        name = "scale_lr" if server.scale_lr else "drop_after"
        raise ConfigError(
            f"server.{name} is for late gradients, and with server.mode = 'sync' there are none: leave it "
            f"out, or use mode 'async' or 'bounded'."
        )
