"""All-gather of byte strings by sends and receives, because their waits name a peer and can be interrupted."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

import torch

from paceline.comm.transport.base import Message, Work
from paceline.errors import WorkerLost

_TAG = (1 << 28) - 9  # below the tags of the MPI back end
_LENGTH = struct.Struct("=q")
_FIRST_BYTES = 1024
"""Number of bytes that are sent together with the length, so that most strings need no second message."""
_MOST_BYTES = 1 << 32


class Workers(Protocol):
    """Interface of ``comm.world.World`` that :func:`all_gather_bytes` uses."""

    @property
    def rank(self) -> int:
        """Rank of this worker."""

    @property
    def size(self) -> int:
        """Number of workers."""

    @property
    def others(self) -> list[int]:
        """Ranks of all other workers."""

    def start_transfers(self, sends: list[Message], receives: list[Message], *, host: bool = False) -> Sequence[Work]:
        """See ``World.start_transfers``."""


def all_gather_bytes(workers: Workers, own: bytes) -> list[bytes]:
    """Return the byte strings of all workers in rank order. All workers must call this function together."""
    first = (_LENGTH.pack(len(own)) + own[:_FIRST_BYTES]).ljust(_LENGTH.size + _FIRST_BYTES, b"\0")
    firsts = _exchange(workers, first, dict.fromkeys(workers.others, len(first)))
    lengths = {peer: _LENGTH.unpack_from(got)[0] for peer, got in firsts.items()}
    for peer, length in lengths.items():
        if not 0 <= length <= _MOST_BYTES:
            raise WorkerLost(f"Rank {workers.rank}: rank {peer} sent a message of {length} bytes; it cannot be read.")
    longer = {peer: length - _FIRST_BYTES for peer, length in lengths.items() if length > _FIRST_BYTES}
    rests = _exchange(workers, own[_FIRST_BYTES:], longer)
    gathered = {peer: (got[_LENGTH.size :] + rests.get(peer, b""))[: lengths[peer]] for peer, got in firsts.items()}
    return [own if rank == workers.rank else gathered[rank] for rank in range(workers.size)]


def _exchange(workers: Workers, own: bytes, lengths: dict[int, int]) -> dict[int, bytes]:
    """Send bytes, if not empty, to all others, and receive the given number of bytes from each of these peers."""
    rooms = {peer: torch.empty(length, dtype=torch.uint8) for peer, length in lengths.items()}
    sent = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else None
    sends = [Message(sent, peer, _TAG) for peer in workers.others] if sent is not None else []
    receives = [Message(room, peer, _TAG) for peer, room in rooms.items()]
    for transfer in workers.start_transfers(sends, receives, host=True):
        transfer.wait()
    return {peer: room.numpy().tobytes() for peer, room in rooms.items()}
