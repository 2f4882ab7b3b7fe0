"""Data of workers that join, and lost shards: waiting for a worker that has them, or training without them.

::

    worker 0    step 7 ✗ ─ membership 1 ─ waits for shard b ──── membership 2 ─ catch up ─ step 7
    worker 1    step 7 †     with shard b
    worker 2    ............................ ready, with shard b ─ membership 2 ─ catch up ─ step 7

The workers decide together, several times a second, whether to wait on. They wait ``wait_seconds`` from the loss, also
if the membership changes during the wait.
"""

from __future__ import annotations

import logging
import math
import time

from paceline.coordinator.types import Generation
from paceline.data.growing.order import GrowingOrder
from paceline.data.located.agreement import ShardsLost
from paceline.data.located.order import LocatedOrder
from paceline.environments import env
from paceline.errors import InputError, WorkerLost
from paceline.step.context import TrainingContext
from paceline.training.recovery.activity import RE_FORMING
from paceline.training.recovery.state_transfer import share_samples

_log = logging.getLogger("paceline")
_POLL_SECONDS = 0.2


class WorkersJoin(WorkerLost):
    """The workers re-form, because workers are ready to join, which may have the lost shards."""


def join_data(context: TrainingContext, generation: Generation) -> None:
    """Get the samples that others have added, and refuse workers that join with shards of other data.

    All workers call this together, before a state moves.

    Raises:
        InputError: this worker is refused. The run continues without it.
        WorkerLost: another worker is refused.
    """
    world, order = context.world, context.order
    if isinstance(order, GrowingOrder):
        share_samples(world, order)  # before a state that has been trained with them
    if not isinstance(order, LocatedOrder) or generation.fresh:
        return
    joined = [rank for rank, member in enumerate(generation.members) if member.worker in generation.joined]
    refused = order.strangers(world, joined, RE_FORMING)
    if world.rank in refused:
        assert world.coordinator is not None
        world.coordinator.report_unfit()
        raise InputError(f"{refused[world.rank]} The run continues without this worker.")
    if refused:
        _tell(context, f"training continues without a worker that was to join. {' '.join(refused.values())}")
        raise WorkerLost(f"Rank {min(refused)} leaves the run: {refused[min(refused)]}", tuple(refused))


def meet(context: TrainingContext, doing: str) -> None:
    """Tell the other workers which samples this worker has, and wait for lost shards if the script asks for it.

    Raises:
        InputError, DisagreementError: together the workers do not have the samples of the run.
        WorkersJoin: workers are ready to join.
    """
    world, order = context.world, context.order
    try:
        order.meet(world, doing)
    except ShardsLost as lost:
        _wait(context, doing, lost)
        if not order.goes_on:
            raise
        order.meet(world, doing, without=True)
        _tell(context, f"training continues without shards that no worker still has (lost='leave out'): {lost.shards}")


def _wait(context: TrainingContext, doing: str, lost: ShardsLost) -> None:
    world, order, launched = context.world, context.order, env.launch_info()
    assert isinstance(order, LocatedOrder)
    seconds, coordinator = order.wait_seconds, world.coordinator
    if not seconds or coordinator is None or launched is None or not launched.elastic:  # no worker can join
        return
    order.lost_since = {name: order.lost_since.get(name, time.monotonic()) for name in lost.names}

    def meanwhile() -> tuple[bool, float]:
        since = time.monotonic() - max(order.lost_since.values())
        joins, waited = zip(*world.gather((coordinator.pending > world.generation, since), doing), strict=True)
        return any(joins), max(waited)  # a worker that has joined since then has waited for less

    joins, waited = meanwhile()
    left = seconds - waited
    if left > 0:
        what = f"waiting at most {math.ceil(left)} s (wait_seconds)"
        _tell(context, f"{what} for shards that no worker still has: {lost.shards}")
    while not joins and waited <= seconds:
        time.sleep(_POLL_SECONDS)
        joins, waited = meanwhile()
    if joins:
        raise WorkersJoin from lost


def _tell(context: TrainingContext, text: str) -> None:
    context.events.mark("note", text=text, warning=True)
    if context.world.rank == 0:
        _log.warning(text)
