"""How a worker that is behind gets the state of one that is further: a joiner, or one that missed a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.comm.shm.tensors import aligned, kinds_of, room_of, views_of
from paceline.comm.world import Message, World

_TAG = 1 << 29
_CHUNK_BYTES = 1 << 26
_WINDOW_BYTES = 1 << 22


@dataclass(frozen=True)
class StateBytes:
    """What is sent: tensors by name, and everything else."""

    tensors: Mapping[str, torch.Tensor]
    rest: Any


def transfer(world: World, sender: int, behind: list[int], state: StateBytes | None) -> StateBytes | None:
    """Send the state of one worker to those that are behind; all workers call this together.

    Args:
        world: the workers.
        sender: the rank that sends.
        behind: the ranks that receive.
        state: of the sender; none on the others.

    Returns:
        the state on those that are behind.

    Raises:
        WorkerLost: a worker was lost meanwhile; nothing has been changed.
    """
    layout = None if state is None else (kinds_of(state.tensors), state.rest)
    kinds, rest = world.gather(layout, "transferring the state")[sender]
    total = max(1, room_of(kinds))
    move = _over_network if world.shared_memory is None else _through_shared_memory
    flat = move(world, sender, behind, state, total)
    return None if flat is None else StateBytes(views_of(flat, kinds), rest)


def _through_shared_memory(
    world: World, sender: int, behind: list[int], state: StateBytes | None, total: int
) -> torch.Tensor | None:
    """Move the state chunk by chunk through a window of two, so that few pages are touched for the first time."""
    memory = world.shared_memory
    assert memory is not None
    blocks, flag = memory.share(2 * _WINDOW_BYTES), memory.reserve(2)
    window = torch.frombuffer(blocks[sender], dtype=torch.uint8, count=2 * _WINDOW_BYTES).view(2, -1)
    starts = enumerate(range(0, total, _WINDOW_BYTES), 1)
    if state is not None:
        segments = _segments(state)
        for number, start in starts:
            memory.wait(flag + 1, number - 2, behind)
            _fill(window[number % 2], start, segments)
            memory.announce(flag, number)
        return None
    if world.rank not in behind:
        return None
    flat = torch.empty(total, dtype=torch.uint8)
    for number, start in starts:
        memory.wait(flag, number, [sender])
        chunk = flat[start : start + _WINDOW_BYTES]
        chunk.copy_(window[number % 2][: chunk.numel()])
        memory.announce(flag + 1, number)
    return flat


def _over_network(
    world: World, sender: int, behind: list[int], state: StateBytes | None, total: int
) -> torch.Tensor | None:
    if world.rank != sender and world.rank not in behind:
        return None
    flat = torch.empty(total, dtype=torch.uint8)
    if state is not None:
        _fill(flat, 0, _segments(state))
    transfers = []
    for number, chunk in enumerate(flat.split(_CHUNK_BYTES)):
        if state is not None:
            transfers += world.start_transfers([Message(chunk, rank, _TAG + number) for rank in behind], [])
        else:
            transfers += world.start_transfers([], [Message(chunk, sender, _TAG + number)])
    for transfer in transfers:
        transfer.wait()
    return None if state is not None else flat


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
