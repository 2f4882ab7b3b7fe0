"""Measurement of a model on its first microbatch, and of the links between workers."""

from __future__ import annotations

import time
from statistics import median

import torch

from paceline.comm.transport.base import Message
from paceline.comm.world import World
from paceline.partition.cut import layers_of
from paceline.partition.loss_check import check_loss
from paceline.partition.profile import measure_layers
from paceline.planning.costs import Profile
from paceline.schedule.balance import LayerCost
from paceline.step.context import TrainingContext

_LINK_BYTES = 8 << 20
_LINK_REPEATS = 5


def profile(context: TrainingContext) -> Profile:
    """Measure the layers of a model on rank 0, then the links of all workers. All workers call this together.

    Raises:
        InputError: the model cannot be cut, or the loss uses its parameters.
    """
    costs = _layer_costs(context) if context.world.rank == 0 else []
    context.world.gather(None, "profile")  # the other workers stay idle while rank 0 measures
    link = _link(context.world)
    order, model = context.order, type(context.compute.model).__name__
    return Profile(model, tuple(costs), len(order.parts_of(0)[0]), order.microbatches, link)


def _layer_costs(context: TrainingContext) -> list[LayerCost]:
    group = context.feed.load(0, [range(1)])[0]
    check_loss(context.compute, group)
    return measure_layers(context.compute, layers_of(context.compute.model, context.compute.input_of(group)), group)


def _link(world: World) -> float | None:
    """Return the bytes per second in each direction over the slowest link between neighbors, or None without links."""
    found = []
    world.await_process_group()
    for first in range(world.size - 1):
        if world.rank in (first, first + 1):
            found.append(_speed(world, 2 * first + 1 - world.rank))
        world.gather(None, "profile")
    speeds = [speed for measured in world.gather(found, "profile") for speed in measured]
    return min(speeds, default=None)


def _speed(world: World, peer: int) -> float:
    """Return the bytes per second in each direction, with both in use at once as in a pipeline."""
    own, others = (torch.zeros(_LINK_BYTES, dtype=torch.uint8, device=world.device) for _ in range(2))
    seconds = []
    for tag in range(_LINK_REPEATS + 1):
        begin = time.perf_counter()
        for transfer in world.start_transfers([Message(own, peer, tag)], [Message(others, peer, tag)]):
            transfer.wait()
        world.synchronize()
        seconds.append(time.perf_counter() - begin)
    return _LINK_BYTES / median(seconds[1:])
