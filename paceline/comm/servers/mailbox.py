"""Mailbox in shared memory for gradients, which workers write and servers read."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from paceline.comm.shm.arena import SharedMemory
from paceline.comm.shm.tensors import aligned, view_of
from paceline.comm.values import decode, encode
from paceline.system.torch_internals import foreach_copy_

_LENGTH = struct.Struct("<q")
_ANSWER = struct.Struct("<qqd")
_WORDS_BYTES = 1 << 20


class Reply(NamedTuple):
    """A server's reply to a gradient: version after the update (-1 if dropped), delay in updates, learning rate."""

    version: int
    delay: int
    rate: float


class Mailbox:
    """A message slot for each worker. All workers construct the mailbox together.

    Args:
        examples: tensors with the types and shapes of the gradients.
        words: size in bytes of the tensors inside the message that accompanies the gradients.
    """

    def __init__(self, shared_memory: SharedMemory, examples: Sequence[torch.Tensor], words: int) -> None:
        self._room = _WORDS_BYTES + 2 * words
        places, place = [], self._room
        for example in examples:
            places.append(place)
            place += aligned(example.nbytes)
        self._blocks = shared_memory.share(place)
        self._answers = shared_memory.share(_ANSWER.size * len(self._blocks))
        self._views = [
            [
                view_of(block, start, example.dtype, example.shape)
                for start, example in zip(places, examples, strict=True)
            ]
            for block in self._blocks
        ]

    def write(self, rank: int, gradients: Sequence[torch.Tensor | None], words: Any) -> None:
        """Write gradients and a message into the slot of a worker. A gradient may be None."""
        given = [(view, value) for view, value in zip(self._views[rank], gradients, strict=True) if value is not None]
        if given:
            foreach_copy_([view for view, _ in given], [value for _, value in given])
        written = encode((words, [value is not None for value in gradients]))
        assert len(written) <= self._room - _LENGTH.size, f"{len(written)} bytes beside the gradients"
        _LENGTH.pack_into(self._blocks[rank], 0, len(written))
        self._blocks[rank][_LENGTH.size : _LENGTH.size + len(written)] = written

    def words(self, rank: int) -> tuple[Any, list[bool]]:
        """Return the message in a slot, and for each gradient whether the slot holds it."""
        (length,) = _LENGTH.unpack_from(self._blocks[rank], 0)
        words, there = decode(bytes(self._blocks[rank][_LENGTH.size : _LENGTH.size + length]))
        return words, there

    def gradients(self, rank: int) -> list[torch.Tensor]:
        """Return views of all gradients of a slot. The content of a missing gradient is undefined."""
        return self._views[rank]

    def answer(self, server: int, rank: int, answer: Reply) -> None:
        """Write a server's reply to a worker."""
        _ANSWER.pack_into(self._answers[server], rank * _ANSWER.size, *answer)

    def answered(self, server: int, rank: int) -> Reply:
        """Return a server's reply to a worker."""
        return Reply(*_ANSWER.unpack_from(self._answers[server], rank * _ANSWER.size))
