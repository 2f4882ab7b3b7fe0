"""Recovery of sharded state after a loss: gather the shards on all workers, or go back to a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.load import Shares
from paceline.checkpoint.training_state import TrainingState
from paceline.checkpoint.weights.sparse_embedding import hold_rows
from paceline.errors import CheckpointError
from paceline.partition.flags import requires_grad_flags, training_flags
from paceline.schedule.slices import not_owned
from paceline.step.context import TrainingContext
from paceline.step.divided.consolidate import consolidate_state_dict
from paceline.strategies import registry
from paceline.strategies.base import Strategy
from paceline.strategies.sharded.shards import unite
from paceline.training.progress import Progress, furthest_of
from paceline.training.recovery.activity import RE_FORMING
from paceline.training.recovery.beginning import resume


def assemble(context: TrainingContext, everyone: Sequence[Progress | None]) -> bool:
    """Gather the whole state on all workers, if it is sharded, unless :func:`move` divides it among them again.

    All workers call this together.

    Returns:
        whether the state is complete. False if a shard is lost, or if shards belong to different steps and the strategy
        must reproduce the reference bit for bit.
    """
    if all(one is None or one.owned is None for one in everyone):
        return True
    steps = {one.steps + one.ahead for one in everyone if one is not None}
    if max(steps) > furthest_of(everyone).steps:  # no remaining worker has completed the step
        return False
    whole = _whole(everyone)
    if any(whole):
        _gather(context, [None if one else frozenset() for one in whole])
        return True
    if missing(context, everyone):
        return False
    if len(steps) > 1 and registry.capabilities_here(context).exact:
        return False
    _gather(context, [frozenset() if one is None else one.owned for one in everyone])
    return True


def _gather(context: TrainingContext, owned: Sequence[frozenset[str] | None]) -> None:
    if not loads_shares(context):
        hold_rows(context.compute.model)
        if context.held.names:  # the shares of a strategy whose last worker this is
            unite(context.update, context.held.tensors)
            context.held.clear()
        consolidate_state_dict(context, owned)


def move(context: TrainingContext, everyone: Sequence[Progress | None]) -> Shares | None:
    """Move the parts that change hands to their new holders, if each worker gets a share of the state.

    All workers call this together.

    Returns:
        new shares, for this worker to load. None if the workers have the whole state.

    Raises:
        WorkerLost: a worker was lost. The state that this worker holds is unchanged.
    """
    most = furthest_of(everyone)
    if not loads_shares(context) or all(
        one is not None and one.owned is None and one.key == most.key for one in everyone
    ):
        return None
    shares, own = registry.prepare(context, moves=True), everyone[context.world.rank]
    assert shares is not None
    has_newest = own is not None and own.steps + own.ahead == most.steps
    shares.move(own.owned if own is not None and has_newest else frozenset(), RE_FORMING)
    return shares


def hash_shares(strategy: Strategy, progress: Progress) -> None:
    """Hash a divided state at a position at which the workers compare, or compared before they divided it again.

    All workers call this together.
    """
    divided = strategy.divided
    if divided is not None and divided.hashes is None and progress.steps == progress.compared:
        divided.hash()


def is_replaced(context: TrainingContext, everyone: Sequence[Progress | None]) -> bool:
    """Return whether the state of others replaces that of this worker, in :func:`assemble` or :func:`move`."""
    whole, own = _whole(everyone), everyone[context.world.rank]
    if own is not None and loads_shares(context):
        return own.steps + own.ahead != furthest_of(everyone).steps
    return own is not None and own.owned is not None and any(whole) and not whole[context.world.rank]


def _whole(everyone: Sequence[Progress | None]) -> list[bool]:
    """Return for each worker whether it has the whole state after the most steps."""
    most = max(one.steps for one in everyone if one is not None)
    return [one is not None and one.owned is None and one.steps == most for one in everyone]


def missing(context: TrainingContext, everyone: Sequence[Progress | None]) -> list[str]:
    """Return the names of parameters and buffers whose newest values no worker has."""
    held = [one.owned for one in everyone if one is not None]
    if None in held:
        return []
    model = context.compute.model
    sizes = {name: value.numel() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    return not_owned(sizes, [name for one in held if one is not None for name in one])


def loads_shares(context: TrainingContext) -> bool:
    """Return whether each worker loads its share of a checkpoint, in an exchange that a loss may interrupt."""
    return context.world.size > 1 and registry.divides_state(context)


def go_back(
    context: TrainingContext, checkpointer: Checkpointer, state: TrainingState, everyone: Sequence[Progress | None]
) -> int:
    """Load the newest checkpoint on all workers and return its number of steps."""
    context.held.clear()
    if not loads_shares(context):
        hold_rows(context.compute.model)
    modes, trained = training_flags(context.compute.model), requires_grad_flags(context.compute.model.parameters())
    with (
        modes.set_to(modes.current()),
        trained.set_to(trained.current()),
    ):  # keep the current modes and flags: the scripts have passed the checkpoint and may have changed them
        steps = resume(context, checkpointer, state, "auto") if checkpointer.enabled else 0
    if steps == 0:
        lost = missing(context, everyone)
        what = "the state of a step was"
        if lost:
            what = f"the state of {lost[0]!r}{f' and {len(lost) - 1} more' if lost[1:] else ''} was"
        if registry.lanes_of(context):
            what = "a replica, or the unsent part of a microbatch, and its copy were"
        copies = ", or keep copies (shard_copy=True)" if loads_shares(context) else ""
        raise CheckpointError(
            f"Rank {context.world.rank}: {what} held by lost workers only, and there is no checkpoint to go back to. "
            f"Save regularly (checkpoint.every){copies}."
        )
    return steps
