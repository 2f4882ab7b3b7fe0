"""How a worker that is behind gets the state of those that are further: a joiner, or one that missed a step.

All workers that are furthest have the same state. Each sends a part of it, of the same size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline import fault_points
from paceline.comm.exchange import even_shares, exchange
from paceline.comm.shm.tensors import aligned, kinds_of, room_of, views_of
from paceline.comm.world import World


@dataclass(frozen=True)
class StateBytes:
    """What is sent: tensors by name, and everything else."""

    tensors: Mapping[str, torch.Tensor]
    rest: Any


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
    segments = [] if state is None else _segments(state)

    def fill(chunk: torch.Tensor, start: int) -> None:
        _fill(chunk, start, segments)
        fault_points.reach("sending the state")

    flat = exchange(world, even_shares(max(1, room_of(kinds)), senders, world.size), behind, fill)
    return None if flat is None else StateBytes(views_of(flat, kinds), rest)


def _segments(state: StateBytes) -> list[tuple[int, torch.Tensor]]:
    """Return where each tensor begins in the flat state, and its bytes."""
    segments, start = [], 0
    for value in state.tensors.values():
        plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        segments.append((start, plain))
        start += aligned(plain.numel())
    return segments


def _fill(chunk: torch.Tensor, start: int, segments: list[tuple[int, torch.Tensor]]) -> None:
    """Copy into a chunk, which begins at ``start`` of the flat state, the bytes that belong there."""
    stop = start + chunk.numel()
    for begin, plain in segments:
        first, last = max(begin, start), min(begin + plain.numel(), stop)
        if first < last:
            chunk[first - start : last - start].copy_(plain[first - begin : last - begin])
