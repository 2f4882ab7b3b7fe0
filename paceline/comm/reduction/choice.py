"""Which reduction fits the workers: by the machines that they are on, and what they can share there."""

from __future__ import annotations

import torch

from paceline.comm.reduction.bucketed import BucketedReduction
from paceline.comm.reduction.hierarchical import HierarchicalReduction
from paceline.comm.reduction.shared_memory import SharedMemoryReduction
from paceline.comm.world import World
from paceline.events import EventLog


def reduction_for(
    world: World, tensors: list[torch.Tensor], events: EventLog, name: str, tags: int = 0
) -> BucketedReduction:
    """The reduction with the fewest bytes between machines: through memory inside of each, where it can be shared."""
    if world.shared_memory is not None:
        return SharedMemoryReduction(world, world.shared_memory, tensors, events, name)
    if world.host_memory is not None:
        return HierarchicalReduction(world, world.host_memory, tensors, events, name, tags)
    return BucketedReduction(world, tensors, events, name, tags)
