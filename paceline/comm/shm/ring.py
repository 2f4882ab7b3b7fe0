"""Lists of tensors from one worker to another of the same machine, through memory that both see.

The sender writes a list into the next of a few places and announces how many it has written; the receiver copies it out
and announces how many it has taken. No socket is used, and nothing waits for a thread that reads one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm.shm.arena import SharedMemory

_PLACES = 8
"""So many lists may be on their way before the sender waits."""
LARGEST_BYTES = 1 << 20
"""Of a list. Larger ones are for the network: its copying then goes on beside computing, and all places together would
take memory that nobody expects."""
_MOST_FLAGS = 1 << 13


class Rings:
    """All that is sent between the workers of a machine in lists of tensors.

    Args:
        memory: that they share.
        size: how many workers there are.
        count: of lanes from each worker to each; all workers make these together, with the same count.
    """

    def __init__(self, memory: SharedMemory, size: int, count: int) -> None:
        self._memory = memory
        self._size = size
        self._count = count
        self._flags = memory.reserve(2 * size * count)
        self._rings: dict[tuple[int, int, int], Ring] = {}

    def ring(self, sender: int, receiver: int, number: int) -> Ring:
        """One of the lanes from a worker to another."""
        key = sender, receiver, number
        if key not in self._rings:
            sent = number * self._size + receiver
            taken = (self._count + number) * self._size + sender
            ends = (sender, self._flags + sent), (receiver, self._flags + taken)
            self._rings[key] = Ring(self._memory, *ends, sent * _PLACES)
        return self._rings[key]


def can_have(size: int, count: int) -> bool:
    """Whether there is room for so many lanes from each of so many workers to each."""
    return 2 * size * count <= _MOST_FLAGS


class Ring:
    """A way for lists of tensors from one worker to another, in order.

    Args:
        memory: that both see.
        sent: the rank of the sender, and the flag in which it announces how many lists it has written.
        taken: the rank of the receiver, and the flag in which it announces how many it has taken.
        place: the first of its places.
    """

    def __init__(self, memory: SharedMemory, sent: tuple[int, int], taken: tuple[int, int], place: int) -> None:
        self._memory = memory
        self._sender, self._sent = sent
        self._receiver, self._taken = taken
        self._place = place
        self._number = 0

    def send(self, values: Sequence[torch.Tensor]) -> None:
        """Write the next list of contiguous tensors, once there is room.

        Raises:
            WorkerLost: the receiver is gone, or takes nothing for the timeout.
        """
        if self._number >= _PLACES:
            self._memory.wait(self._taken, self._number - _PLACES + 1, [self._receiver])
        place = self._next()
        for value in values:
            place += self._memory.write(place, _bytes_of(value))
        self._memory.announce(self._sent, self._number)

    def take(self, values: Sequence[torch.Tensor]) -> None:
        """Wait for the next list, and copy it into tensors of its types and shapes.

        Raises:
            WorkerLost: the sender is gone, or sends nothing for the timeout.
        """
        self._memory.wait(self._sent, self._number + 1, [self._sender])
        place = self._next()
        for value in values:
            place += self._memory.read(self._sender, place, _bytes_of(value))
        self._memory.announce(self._taken, self._number)

    def _next(self) -> int:
        """Where the next list stands."""
        place = (self._place + self._number % _PLACES) * LARGEST_BYTES
        self._number += 1
        return place


def _bytes_of(value: torch.Tensor) -> memoryview:
    return value.reshape(-1).view(torch.uint8).numpy().data
