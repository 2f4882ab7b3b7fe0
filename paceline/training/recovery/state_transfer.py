"""How a worker that is behind gets the state of those that are further: a joiner, or one that missed a step.

All workers that are furthest have the same state. Each sends a part of it, of the same size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.comm.collectives.exchange import even_shares, exchange, fill_from
from paceline.comm.shm.tensors import kinds_of, room_of, views_of
from paceline.comm.world import World
from paceline.system import fault_points


@dataclass(frozen=True)
class StateBytes:
    """What is sent: tensors by name, everything else, and after how many steps that is the state."""

    tensors: Mapping[str, torch.Tensor]
    rest: Any
    steps: int = 0


def transfer(world: World, senders: Sequence[int], state: StateBytes | None) -> StateBytes | None:
    """Send the state of some workers to all others; all workers call this together.

    Args:
        world: the workers.
        senders: the ranks that have the state, the same on all of them. The first one describes it.
        state: of a sender; none on the others.

    Returns:
        the state on those that did not have it.

    Raises:
        WorkerLost: a worker was lost meanwhile; nothing has been changed.
    """
    layout = None
    if state is not None:
        kinds = kinds_of(state.tensors)
        digest = hashlib.sha256(repr(kinds).encode()).digest()
        layout = digest, (kinds, state.rest) if world.rank == senders[0] else None
    layouts = world.gather(layout, "transferring the state")
    agreed, (kinds, rest) = layouts[senders[0]]
    senders = [rank for rank in senders if layouts[rank][0] == agreed]  # one may lack what a step would have added
    behind = [rank for rank, one in enumerate(layouts) if one is None]
    inner = fill_from(() if state is None else state.tensors.values())

    def fill(chunk: torch.Tensor, start: int) -> None:
        inner(chunk, start)
        fault_points.reach("sending the state", 0 if state is None else state.steps)

    flat = exchange(world, even_shares(max(1, room_of(kinds)), senders, world.size), behind, fill)
    return None if flat is None else StateBytes(views_of(flat, kinds), rest)
