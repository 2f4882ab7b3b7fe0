"""State transfer to workers that are behind: joiners, and workers that missed a step.

The most advanced workers all have the same state. Each of them sends an equal part of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.checkpoint import encoding
from paceline.comm.collectives.exchange import even_shares, exchange, fill_from
from paceline.comm.shm.tensors import kinds_of, room_of, views_of
from paceline.comm.world import World
from paceline.data.growing.order import GrowingOrder
from paceline.system import fault_points


@dataclass(frozen=True)
class StateBytes:
    """State to send: tensors by name, all other values, and its number of completed steps."""

    tensors: Mapping[str, torch.Tensor]
    rest: Any
    steps: int = 0


def transfer(world: World, senders: Sequence[int], state: StateBytes | None) -> StateBytes | None:
    """Send the state of the senders to all other workers. All workers call this together.

    Args:
        senders: ranks that have the state. The first sender also sends its layout.

    Raises:
        WorkerLost: a worker was lost during the transfer. No state has been changed.
    """
    layout = None
    if state is not None:
        kinds = kinds_of(state.tensors)
        digest = hashlib.sha256(repr(kinds).encode()).digest()
        layout = digest, (kinds, state.rest) if world.rank == senders[0] else None
    layouts = world.gather(layout, "transferring the state")
    agreed, (kinds, rest) = layouts[senders[0]]
    senders = [rank for rank in senders if layouts[rank][0] == agreed]  # a sender may lack tensors that a step adds
    behind = [rank for rank, one in enumerate(layouts) if one is None]
    inner = fill_from(() if state is None else state.tensors.values())

    def fill(chunk: torch.Tensor, start: int) -> None:
        inner(chunk, start)
        fault_points.reach("sending the state", 0 if state is None else state.steps)

    flat = exchange(world, even_shares(max(1, room_of(kinds)), senders, world.size), behind, fill)
    return None if flat is None else StateBytes(views_of(flat, kinds), rest)


def share_samples(world: World, order: GrowingOrder) -> None:
    """Send the samples that were added during training to the workers that do not have all. All workers call this.

    Raises:
        WorkerLost: a worker was lost during the transfer. No data set has been changed.
    """
    entries = world.gather(order.entries, "transferring the samples")
    senders = [rank for rank, one in enumerate(entries) if one == max(entries)]
    if len(senders) == world.size:
        return
    state, tensors = None, dict[str, torch.Tensor]()
    if world.rank in senders:
        rest = encoding.encode(order.state_from(min(entries)), tensors, "the samples")
        state = StateBytes(tensors, rest)
    if (received := transfer(world, senders, state)) is not None:
        order.load(encoding.decode(received.rest, received.tensors, None, "the samples"))
