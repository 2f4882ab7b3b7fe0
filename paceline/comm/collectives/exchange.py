"""Transfer of a state from several workers at once to the workers that need it.

::

    the state    [ rank 0's share | rank 1's share | rank 2's share ]      as bytes
    rank 3       receives all three shares; a receiver that sends a share receives only the others
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from paceline.comm.shm.arena import SharedMemory
from paceline.comm.shm.tensors import CACHE_LINE, aligned, bytes_of
from paceline.comm.transport.base import Message
from paceline.comm.world import World

Fill = Callable[[torch.Tensor, int], None]
"""Function that fills a chunk with the bytes of the state from a given offset."""
_TAG = 3 << 26
_CHUNK_BYTES = 1 << 26
_WINDOW_BYTES = 1 << 22


def even_shares(total: int, senders: Sequence[int], size: int) -> list[range]:
    """Divide bytes evenly among senders, in whole cache lines.

    Args:
        senders: ranks that hold the state.

    Returns:
        range of bytes that each rank sends, empty if it sends nothing.

    >>> even_shares(1000, [0, 2], 3)
    [range(0, 512), range(0, 0), range(512, 1000)]
    """
    lines = -(-total // CACHE_LINE)
    ends = [min(total, lines * place // len(senders) * CACHE_LINE) for place in range(len(senders) + 1)]
    ends[-1] = total
    shares = [range(0)] * size
    for place, rank in enumerate(senders):
        shares[rank] = range(ends[place], ends[place + 1])
    return shares


def exchange(world: World, shares: Sequence[range], receivers: Sequence[int], fill: Fill) -> torch.Tensor | None:
    """Send the bytes of a state to the receivers. All workers must call this function together.

    Args:
        shares: range of bytes that each rank sends. The ranges cover the state without overlap.
        receivers: ranks that receive the whole state.
        fill: writes bytes of this worker's share into a chunk.

    Returns:
        the bytes of the whole state on a receiver, None on other workers.
    """
    flat = None
    if world.rank in receivers:
        flat = torch.empty(sum(map(len, shares)), dtype=torch.uint8)
    if world.shared_memory is not None:
        _through_shared_memory(world.rank, world.shared_memory, shares, receivers, fill, flat)
    else:
        _over_network(world, shares, receivers, fill, flat)
    return flat


def fill_from(tensors: Iterable[torch.Tensor], start: int = 0) -> Fill:
    """Return a :data:`Fill` for tensors that are packed from byte ``start`` on, each aligned to a cache line."""
    segments = []
    for value in tensors:
        plain = bytes_of(value.cpu())
        segments.append((start, plain))
        start += aligned(plain.numel())

    def fill(chunk: torch.Tensor, start: int) -> None:
        stop = start + chunk.numel()
        for begin, plain in segments:
            first, last = max(begin, start), min(begin + plain.numel(), stop)
            if first < last:
                chunk[first - start : last - start].copy_(plain[first - begin : last - begin])

    return fill


def _through_shared_memory(
    rank: int, memory: SharedMemory, shares: Sequence[range], receivers: Sequence[int], fill: Fill,
    flat: torch.Tensor | None,
) -> None:  # fmt: skip
    """Copy in chunks through two buffers per sender, so that few pages are touched for the first time."""
    blocks, flag = memory.share(2 * _WINDOW_BYTES), memory.reserve(2)
    windows = [torch.frombuffer(block, dtype=torch.uint8, count=2 * _WINDOW_BYTES).view(2, -1) for block in blocks]
    others = [receiver for receiver in receivers if receiver != rank]
    for number in range(1, 1 + -(-max(map(len, shares)) // _WINDOW_BYTES)):
        first = (number - 1) * _WINDOW_BYTES
        parts = [share[first : first + _WINDOW_BYTES] for share in shares]
        if own := parts[rank]:
            memory.wait(flag + 1, number - 2, others)
            fill(windows[rank][number % 2][: len(own)], own.start)
            memory.announce(flag, number)
        if flat is None:
            continue
        for sender, part in enumerate(parts):
            if part:
                memory.wait(flag, number, [sender])
                flat[part.start : part.stop].copy_(windows[sender][number % 2][: len(part)])
        memory.announce(flag + 1, number)


def _over_network(
    world: World, shares: Sequence[range], receivers: Sequence[int], fill: Fill, flat: torch.Tensor | None
) -> None:
    own, others = shares[world.rank], [receiver for receiver in receivers if receiver != world.rank]
    transfers = []
    if own and (others or flat is not None):
        mine = torch.empty(len(own), dtype=torch.uint8) if flat is None else flat[own.start : own.stop]
        start = own.start
        for number, chunk in enumerate(mine.split(_CHUNK_BYTES)):
            fill(chunk, start)
            start += len(chunk)
            transfers += world.start_transfers([Message(chunk, rank, _TAG + number) for rank in others], [], host=True)
    if flat is not None:
        for sender, share in enumerate(shares):
            if share and sender != world.rank:
                chunks = flat[share.start : share.stop].split(_CHUNK_BYTES)
                messages = [Message(chunk, sender, _TAG + number) for number, chunk in enumerate(chunks)]
                transfers += world.start_transfers([], messages, host=True)
    for transfer in transfers:
        transfer.wait()
