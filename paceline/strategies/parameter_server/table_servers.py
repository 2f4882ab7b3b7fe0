"""Parameter servers of models with sparse embeddings, whose tables synchronous servers divide by rows.

::

    one machine     worker 0   F0 B0 ─ rows 3, 7 ─┐            ┌ server 0, rows 0 to 4: update 3    ┐ weights of the
                    worker 1   F1 B1 ─ rows 3, 8 ─┴ to servers ┴ server 1, rows 5 to 9: update 7, 8 ┘ machine

    two machines    worker 0 ─ pull 7 ─ F0 B0 ─ rows 3, 7 ─┐            ┌ server 0, machine 0, rows 0 to 4: update 3
                    worker 1 ─ pull 3 ─ F1 B1 ─ rows 3, 8 ─┴ to servers ┴ server 1, machine 1, rows 5 to 9: update 7, 8

The step is that of ``strategies.sharded.strategy``, of which only the servers own slices: they get the rows that have
gradients, keep their optimizer state and update them. The workers of a machine read the rows that they need in one copy
of the weights, and each other machine gets the rows that have changed. With a ``paceline.SparseEmbedding`` each machine
has only the rows of its own servers, and forward passes pull the others (``strategies.sharded.pulled_rows``). No worker
holds the whole state: it is saved, loaded and moved by slices.

Modes async and bounded are those of ``strategies.parameter_server.strategy``. On one machine the worker that pushes
changes the rows of its batch in the one copy of a table that the workers share. On several machines, and with
dedicated servers, each worker has a table of its own and pulls the rows that a step uses.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from paceline.data.order import BatchOrder
from paceline.settings import Settings
from paceline.step.context import TrainingContext
from paceline.strategies.base import Capabilities, Strategy
from paceline.strategies.parameter_server import strategy
from paceline.strategies.parameter_server.async_server import servers_among, warnings_of_servers
from paceline.strategies.sharded.holders import Owners
from paceline.strategies.sharded.prepared import PreparedShards
from paceline.strategies.sharded.prepared import prepare as prepare_shards
from paceline.strategies.sharded.strategy import Sharded


def _owners(context: TrainingContext) -> Owners:
    settings, size = context.settings, context.world.size
    return Owners(servers_among(settings, size), None if settings.server.copies > 1 else False)


def build(context: TrainingContext) -> Strategy:
    """Build the strategy for two or more workers."""
    if not _divides(context.settings):
        return strategy.build(context)
    context.warnings.extend(warnings_of_servers(context))
    return Sharded(context, _owners(context), context.settings.server.dedicated)


def prepare(context: TrainingContext, moves: bool) -> PreparedShards:
    """Divide the state among the servers before it is loaded."""
    return prepare_shards(context, moves, _owners(context))


def _divides(settings: Settings) -> bool:
    """Return whether servers divide the whole state."""
    return settings.server.mode == "sync"


def capabilities(settings: Settings, workers: int) -> Capabilities:
    """Return the capabilities of parameter servers, which divide the whole state if they are synchronous."""
    plain, several = strategy.capabilities(settings, workers), workers > 1
    if _divides(settings):
        return replace(plain, divides_state=3 * several, shares_weights=several)
    return replace(plain, audits=plain.audits and not several)  # others change a table while a step is computed


def validate(settings: Settings, model: nn.Module, order: BatchOrder, workers: int, largest: int) -> None:
    """Raise ConfigError as ``strategy.validate`` does. Synchronous servers may share a single table."""
    validated = strategy.validate_servers if _divides(settings) else strategy.validate
    validated(settings, model, order, workers, largest)
