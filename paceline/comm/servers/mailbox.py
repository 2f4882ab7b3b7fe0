"""Gradients on their way to servers, in shared memory: the worker writes, the servers read."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from paceline.comm.shm.arena import SharedMemory
from paceline.comm.shm.tensors import aligned, view_of
from paceline.comm.values import decode, encode

_LENGTH = struct.Struct("<q")
_ANSWER = struct.Struct("<qqd")
_WORDS_BYTES = 1 << 20


class Reply(NamedTuple):
    """What became of a gradient: the update that it made (-1: none, it was dropped), how late it was, and the rate."""

    version: int
    delay: int
    rate: float


class Mailbox:
    """One message slot of each worker; all workers make them together.

    Args:
        shared_memory: of the workers.
        examples: tensors like the gradients.
        words: bytes of the tensors that go along with the words.
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
        """Fill the slot of a worker."""
        given = [(view, value) for view, value in zip(self._views[rank], gradients, strict=True) if value is not None]
        if given:
            torch._foreach_copy_([view for view, _ in given], [value for _, value in given])
        written = encode((words, [value is not None for value in gradients]))
        assert len(written) <= self._room - _LENGTH.size, f"{len(written)} bytes beside the gradients"
        _LENGTH.pack_into(self._blocks[rank], 0, len(written))
        self._blocks[rank][_LENGTH.size : _LENGTH.size + len(written)] = written

    def words(self, rank: int) -> tuple[Any, list[bool]]:
        """What a slot holds besides the gradients, and which of these there are."""
        (length,) = _LENGTH.unpack_from(self._blocks[rank], 0)
        words, there = decode(bytes(self._blocks[rank][_LENGTH.size : _LENGTH.size + length]))
        return words, there

    def gradients(self, rank: int) -> list[torch.Tensor]:
        """The gradients as they lie there; what holds one that is not there has no meaning."""
        return self._views[rank]

    def answer(self, server: int, rank: int, answer: Reply) -> None:
        """Tell a worker what became of its gradient."""
        _ANSWER.pack_into(self._answers[server], rank * _ANSWER.size, *answer)

    def answered(self, server: int, rank: int) -> Reply:
        """What a server sent a worker."""
        return Reply(*_ANSWER.unpack_from(self._answers[server], rank * _ANSWER.size))
