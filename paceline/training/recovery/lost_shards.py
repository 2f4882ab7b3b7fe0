"""Lost shards, which no worker has any more: waiting for a worker that has them, or training without them.

::

    worker 0    step 7 ✗ ─ membership 1 ─ waits for shard b ──── membership 2 ─ catch up ─ step 7
    worker 1    step 7 †     with shard b
    worker 2    ............................ ready, with shard b ─ membership 2 ─ catch up ─ step 7

The workers decide together, several times a second, whether to wait on.
"""

from __future__ import annotations

import logging
import time

from paceline.data.located.agreement import ShardsLost
from paceline.environments import env
from paceline.errors import WorkerLost
from paceline.step.context import TrainingContext

_log = logging.getLogger("paceline")
_POLL_SECONDS = 0.2


class WorkersJoin(WorkerLost):
    """The workers re-form, because workers are ready to join, which may have the lost shards."""


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
        _tell(context, f"training goes on without shards that no worker has any more (lost='leave out'): {lost.shards}")


def _wait(context: TrainingContext, doing: str, lost: ShardsLost) -> None:
    world, seconds, launched = context.world, context.order.wait_seconds, env.launch_info()
    if not seconds or world.coordinator is None or launched is None or not launched.elastic:  # nobody can join
        return
    _tell(
        context, f"waiting at most {seconds:g} s (wait_seconds) for shards that no worker has any more: {lost.shards}"
    )
    end, is_over = time.monotonic() + seconds, False
    while not is_over:
        own = world.coordinator.pending > world.generation, time.monotonic() > end
        joins, over = zip(*world.gather(own, doing), strict=True)
        if any(joins):
            raise WorkersJoin from lost
        is_over = over[0]
        time.sleep(_POLL_SECONDS)


def _tell(context: TrainingContext, text: str) -> None:
    context.events.mark("note", text=text, warning=True)
    if context.world.rank == 0:
        _log.warning(text)
