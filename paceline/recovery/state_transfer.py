"""How a worker that is behind gets the state of one that is further: a joiner, or one that missed a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from paceline.comm.shm.tensors import aligned, kinds_of, room_of, views_of
from paceline.comm.world import Message, World

_TAG = 1 << 29
_PIECE_BYTES = 1 << 26
_WINDOW_BYTES = 1 << 22


@dataclass(frozen=True)
class StateBytes:
    """What is handed over: tensors by name, and everything else."""

    tensors: Mapping[str, torch.Tensor]
    rest: Any


def transfer(world: World, donor: int, behind: list[int], load: StateBytes | None) -> StateBytes | None:
    """Give the donor's load to the workers that are behind; all workers call this together.

    Args:
        world: the workers.
        donor: the rank that gives.
        behind: the ranks that take.
        load: of the donor; none on the others.

    Returns:
        the load on those that are behind.

    Raises:
        WorkerLost: a worker was lost meanwhile; nothing has been changed.
    """
    kinds = None if load is None else kinds_of(load.tensors)
    told = world.gather(None if load is None else (kinds, load.rest), "handing over")
    kinds, rest = told[donor]
    total = max(1, room_of(kinds))
    way = _over_network if world.shared_memory is None else _through_memory
    flat = way(world, donor, behind, load, total)
    return None if flat is None else StateBytes(views_of(flat, kinds), rest)


def _through_memory(
    world: World, donor: int, behind: list[int], load: StateBytes | None, total: int
) -> torch.Tensor | None:
    """Piece by piece through a window of two places, so that little memory is touched for the first time."""
    memory = world.shared_memory
    assert memory is not None
    blocks, flag = memory.share(2 * _WINDOW_BYTES), memory.reserve(2)
    window = torch.frombuffer(blocks[donor], dtype=torch.uint8, count=2 * _WINDOW_BYTES).view(2, -1)
    starts = enumerate(range(0, total, _WINDOW_BYTES), 1)
    if load is not None:
        parts = _parts(load)
        for number, start in starts:
            memory.wait(flag + 1, number - 2, behind)
            _fill(window[number % 2], start, parts)
            memory.announce(flag, number)
        return None
    if world.rank not in behind:
        return None
    flat = torch.empty(total, dtype=torch.uint8)
    for number, start in starts:
        memory.wait(flag, number, [donor])
        piece = flat[start : start + _WINDOW_BYTES]
        piece.copy_(window[number % 2][: piece.numel()])
        memory.announce(flag + 1, number)
    return flat


def _over_network(
    world: World, donor: int, behind: list[int], load: StateBytes | None, total: int
) -> torch.Tensor | None:
    if world.rank != donor and world.rank not in behind:
        return None
    flat = torch.empty(total, dtype=torch.uint8)
    if load is not None:
        _fill(flat, 0, _parts(load))
    transfers = []
    for place, piece in enumerate(flat.split(_PIECE_BYTES)):
        if load is not None:
            transfers += world.post([Message(piece, rank, _TAG + place) for rank in behind], [])
        else:
            transfers += world.post([], [Message(piece, donor, _TAG + place)])
    for transfer in transfers:
        transfer.wait()
    return None if load is not None else flat


Part: TypeAlias = "tuple[int, torch.Tensor]"


def _parts(load: StateBytes) -> list[Part]:
    """Where each tensor begins in the load, and its bytes."""
    parts, start = [], 0
    for value in load.tensors.values():
        plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        parts.append((start, plain))
        start += aligned(plain.numel())
    return parts


def _fill(place: torch.Tensor, start: int, parts: list[Part]) -> None:
    """Copy what belongs to a piece of the load that begins at ``start``."""
    stop = start + place.numel()
    for begin, plain in parts:
        first, last = max(begin, start), min(begin + plain.numel(), stop)
        if first < last:
            place[first - start : last - start].copy_(plain[first - begin : last - begin])
