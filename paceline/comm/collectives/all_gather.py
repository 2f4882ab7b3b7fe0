"""Asynchronous all-gather of one small tensor per worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from paceline.comm.shm.arena import SharedMemory
from paceline.comm.transport.base import Message
from paceline.comm.world import World


class PendingGather:
    """All-gather in progress."""

    def __init__(self, finish: Callable[[], torch.Tensor]) -> None:
        self._finish = finish
        self._gathered: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """Wait for all workers' tensors. Return them stacked in rank order, on the device of this worker's tensor."""
        if self._gathered is None:
            self._gathered = self._finish()
        return self._gathered


class AllGather:
    """Successive all-gathers of one kind, through shared memory if the workers have any.

    Args:
        tag: tag of the messages over the network. Each kind of all-gather has its own.
        size: size of the largest tensor in bytes.
        host: whether the tensors are on the CPU. By default they are on the device of this worker.
    """

    def __init__(self, world: World, tag: int, size: int, host: bool = False) -> None:
        self.world, self._host, self._tag, self.size = world, host, tag, size
        shared = world.shared_memory if host or world.transport.capabilities.on_host else None
        self._shared = _SharedBlocks(shared, size) if shared else None

    def start(self, own: torch.Tensor) -> PendingGather:
        """Start an all-gather of ``own``. All workers must call this method with tensors of the same shape."""
        if self._shared is not None:
            return PendingGather(partial(self._shared.read, own, self._shared.write(self.world.rank, own)))
        gathered = own.new_empty(self.world.size, *own.shape)
        gathered[self.world.rank] = own
        sends = [Message(own, peer, self._tag) for peer in self.world.others]
        receives = [Message(gathered[peer], peer, self._tag) for peer in self.world.others]
        transfers = self.world.start_transfers(sends, receives, host=self._host)

        def finish() -> torch.Tensor:
            for transfer in transfers:
                transfer.wait()
            return gathered

        return PendingGather(finish)


class _SharedBlocks:
    """Two shared-memory blocks per worker, used alternately.

    Two blocks suffice: before a worker writes again, it completes a reduction with all other workers, and they read the
    previous block before they join that reduction.
    """

    def __init__(self, shared_memory: SharedMemory, size: int) -> None:
        self._shared_memory = shared_memory
        self._blocks = shared_memory.share(size), shared_memory.share(size)
        self._flag = shared_memory.reserve(1)
        self._written = 0

    def write(self, rank: int, own: torch.Tensor) -> int:
        self._written += 1
        block = self._blocks[self._written % 2][rank]
        torch.frombuffer(block, dtype=own.dtype, count=own.numel()).copy_(own.reshape(-1))
        self._shared_memory.announce(self._flag, self._written)
        return self._written

    def read(self, example: torch.Tensor, number: int) -> torch.Tensor:
        """Wait until all workers have written, and return copies of their tensors, stacked."""
        self._shared_memory.wait(self._flag, number)
        count = example.numel()
        blocks = self._blocks[number % 2]
        return torch.stack([torch.frombuffer(one, dtype=example.dtype, count=count) for one in blocks]).view(
            -1, *example.shape
        )
