"""Ring buffers in shared memory for lists of tensors, each for one sender and one receiver.

The sender writes a list into the next slot and announces the number of lists written. The receiver copies the list and
announces the number of lists taken. Neither a socket nor a thread is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm.shm.arena import SharedMemory
from paceline.comm.shm.tensors import bytes_of

_SLOTS = 8  # number of lists in flight before the sender waits
LARGEST_BYTES = 1 << 20
"""Largest size of a list. Larger lists go through sockets, so that copies overlap computation and slots stay small."""
_MOST_FLAGS = 1 << 13


class Rings:
    """Ring buffers between the workers of a machine. All workers must create them together, with the same count."""

    def __init__(self, shared_memory: SharedMemory, size: int, count: int) -> None:
        self._shared_memory, self._size, self._count = shared_memory, size, count
        self._flags = shared_memory.reserve(2 * size * count)
        self._rings: dict[tuple[int, int, int], Ring] = {}

    def ring(self, sender: int, receiver: int, number: int) -> Ring:
        key = sender, receiver, number
        if key not in self._rings:
            sent = number * self._size + receiver
            taken = (self._count + number) * self._size + sender
            ends = (sender, self._flags + sent), (receiver, self._flags + taken)
            self._rings[key] = Ring(self._shared_memory, *ends, sent * _SLOTS)
        return self._rings[key]


def can_have(size: int, count: int) -> bool:
    """Return whether there are enough flags for ``count`` rings from each of ``size`` workers to each."""
    return 2 * size * count <= _MOST_FLAGS


class Ring:
    """Queue of lists of tensors from one worker to another.

    Args:
        sent: rank of the sender, and the flag that announces the number of lists written.
        taken: rank of the receiver, and the flag that announces the number of lists taken.
        first_slot: first slot of the ring in the sender's arena.
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
        """Wait for a free slot and write the next list of contiguous tensors."""
        if self._number >= _SLOTS:
            self._shared_memory.wait(self._taken, self._number - _SLOTS + 1, [self._receiver])
        offset = self._next()
        for value in values:
            offset += self._shared_memory.write(offset, bytes_of(value).numpy().data)
        self._shared_memory.announce(self._sent, self._number)

    def take(self, values: Sequence[torch.Tensor]) -> None:
        """Wait for the next list, and copy it into tensors of the same types and shapes."""
        self._shared_memory.wait(self._sent, self._number + 1, [self._sender])
        offset = self._next()
        for value in values:
            offset += self._shared_memory.read(self._sender, offset, bytes_of(value).numpy().data)
        self._shared_memory.announce(self._taken, self._number)

    def _next(self) -> int:
        """Return the offset of the next slot, and advance past it."""
        offset = (self._first_slot + self._number % _SLOTS) * LARGEST_BYTES
        self._number += 1
        return offset
