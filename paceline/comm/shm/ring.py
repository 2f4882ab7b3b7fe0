"""Ring buffers for lists of tensors from one worker to another of the same machine.

The sender writes a list into the next slot and announces how many it has written; the receiver copies it out and
announces how many it has taken. No socket is used, nor a thread that reads one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm.shm.arena import SharedMemory

_SLOTS = 8
"""Lists in flight before the sender waits."""
LARGEST_BYTES = 1 << 20
"""Of a list. Larger ones go through sockets: copying then overlaps with computing, and the slots stay small."""
_MOST_FLAGS = 1 << 13


class Rings:
    """The ring buffers between the workers of a machine.

    Args:
        shared_memory: that they share.
        size: how many workers there are.
        count: rings from each worker to each; all workers make these together, with the same count.
    """

    def __init__(self, shared_memory: SharedMemory, size: int, count: int) -> None:
        self._shared_memory = shared_memory
        self._size = size
        self._count = count
        self._flags = shared_memory.reserve(2 * size * count)
        self._rings: dict[tuple[int, int, int], Ring] = {}

    def ring(self, sender: int, receiver: int, number: int) -> Ring:
        """Return one of the rings from a worker to another."""
        key = sender, receiver, number
        if key not in self._rings:
            sent = number * self._size + receiver
            taken = (self._count + number) * self._size + sender
            ends = (sender, self._flags + sent), (receiver, self._flags + taken)
            self._rings[key] = Ring(self._shared_memory, *ends, sent * _SLOTS)
        return self._rings[key]


def can_have(size: int, count: int) -> bool:
    """Whether there are flags for so many rings from each of so many workers to each."""
    return 2 * size * count <= _MOST_FLAGS


class Ring:
    """A queue of lists of tensors from one worker to another.

    Args:
        shared_shared_memory: of both.
        sent: the rank of the sender, and the flag in which it announces how many lists it has written.
        taken: the rank of the receiver, and the flag in which it announces how many it has taken.
        first_slot: of the ring, in the sender's arena.
    """

    def __init__(
        self, shared_memory: SharedMemory, sent: tuple[int, int], taken: tuple[int, int], first_slot: int
    ) -> None:
        self._shared_memory = shared_memory
        self._sender, self._sent = sent
        self._receiver, self._taken = taken
        self._first_slot = first_slot
        self._number = 0

    def send(self, values: Sequence[torch.Tensor]) -> None:
        """Write the next list of contiguous tensors, once there is room.

        Raises:
            WorkerLost: the receiver is gone, or takes nothing for the timeout.
        """
        if self._number >= _SLOTS:
            self._shared_memory.wait(self._taken, self._number - _SLOTS + 1, [self._receiver])
        offset = self._next()
        for value in values:
            offset += self._shared_memory.write(offset, _bytes_of(value))
        self._shared_memory.announce(self._sent, self._number)

    def take(self, values: Sequence[torch.Tensor]) -> None:
        """Wait for the next list, and copy it into tensors of its types and shapes.

        Raises:
            WorkerLost: the sender is gone, or sends nothing for the timeout.
        """
        self._shared_memory.wait(self._sent, self._number + 1, [self._sender])
        offset = self._next()
        for value in values:
            offset += self._shared_memory.read(self._sender, offset, _bytes_of(value))
        self._shared_memory.announce(self._taken, self._number)

    def _next(self) -> int:
        """Advance to the next slot; returns its offset."""
        offset = (self._first_slot + self._number % _SLOTS) * LARGEST_BYTES
        self._number += 1
        return offset


def _bytes_of(value: torch.Tensor) -> memoryview:
    return value.reshape(-1).view(torch.uint8).numpy().data
