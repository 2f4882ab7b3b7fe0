"""Moves of a divided state from the workers that hold it to those that need it, as data.

::

    held     worker 0   [0:128]             moves   0 -> 0  [0:64]       what a worker has, it takes from itself
             worker 1   [128:192]                   0 -> 1  [64:128]
    needed   worker 0   [0:64]                      1 -> 1  [128:192]
             worker 1   [64:192]

The plan is the same on all workers. Rounds bound the memory that it needs beside the old and the new shares.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple


class Part(NamedTuple):
    """Elements ``start`` to ``stop`` of a flattened tensor, which a rank holds or needs."""

    rank: int
    start: int
    stop: int


class Move(NamedTuple):
    """Elements ``start`` to ``stop`` of the flattened tensor ``name``, which the receivers get from the sender."""

    name: str
    start: int
    stop: int
    sender: int
    receivers: tuple[int, ...]

    @property
    def is_local(self) -> bool:
        """Whether the receiver has the elements itself."""
        return self.receivers == (self.sender,)


def plan_moves(
    held: Mapping[str, Sequence[Part]], needed: Mapping[str, Sequence[Part]], item_bytes: Mapping[str, int]
) -> list[Move]:
    """Return the moves that give each rank the parts that it needs.

    A rank keeps what it holds. Everything else comes from the holder that has the fewest bytes to send.

    Args:
        held: parts of each tensor. Together they cover the needed parts.
        item_bytes: size of an element of each tensor.

    >>> plan_moves({"a": [Part(0, 0, 128), Part(1, 128, 192)]}, {"a": [Part(0, 0, 64), Part(1, 64, 192)]}, {"a": 4})
    [Move(name='a', start=0, stop=64, sender=0, receivers=(0,)), Move(name='a', start=64, stop=128, sender=0, \
receivers=(1,)), Move(name='a', start=128, stop=192, sender=1, receivers=(1,))]
    """
    moves, sent = [], defaultdict[int, int](int)
    for name, parts in needed.items():
        known = held.get(name, ())
        for start, stop in pairwise(sorted({at for one in (*known, *parts) for at in one[1:]})):
            holders = _ranks(known, start, stop)
            receivers = _ranks(parts, start, stop)
            moves += [Move(name, start, stop, rank, (rank,)) for rank in receivers if rank in holders]
            if others := tuple(rank for rank in receivers if rank not in holders):
                sender = min(holders, key=lambda rank: (sent[rank], rank))
                sent[sender] += (stop - start) * item_bytes[name]
                moves.append(Move(name, start, stop, sender, others))
    return moves


def _ranks(parts: Iterable[Part], start: int, stop: int) -> list[int]:
    return sorted({one.rank for one in parts if one.start <= start and stop <= one.stop})


def most_bytes(moves: Iterable[Move], item_bytes: Mapping[str, int]) -> int:
    """Return the most bytes that a worker sends to others.

    >>> most_bytes([Move("a", 0, 48, 0, (1, 2)), Move("a", 48, 64, 2, (2,))], {"a": 4})
    192
    """
    sent = defaultdict[int, int](int)
    for move in moves:
        sent[move.sender] += 0 if move.is_local else (move.stop - move.start) * item_bytes[move.name]
    return max(sent.values(), default=0)


def rounds_of(moves: Iterable[Move], item_bytes: Mapping[str, int], room: int, line: int) -> list[list[Move]]:
    """Cut moves between workers into rounds in which no worker sends, or receives, more than ``room`` bytes.

    Args:
        line: number of bytes to which each move is aligned in a round. It divides ``room``.

    >>> rounds = rounds_of([Move("a", 0, 48, 0, (1,)), Move("a", 48, 64, 2, (3,))], {"a": 4}, 128, 64)
    >>> [[(one.start, one.stop) for one in moves] for moves in rounds]
    [[(0, 32), (48, 64)], [(32, 48)]]
    """
    rounds: list[list[Move]] = []
    at, load = defaultdict[tuple[bool, int], int](int), defaultdict[tuple[bool, int], int](int)
    for move in moves:
        if move.is_local:
            continue
        size = item_bytes[move.name]
        ends = [(True, move.sender), *((False, rank) for rank in move.receivers)]
        for start in range(move.start, move.stop, room // size):
            piece = move._replace(start=start, stop=min(start + room // size, move.stop))
            count = -(-(piece.stop - start) * size // line) * line
            number = max(at[end] for end in ends)
            number += any(at[end] == number and load[end] + count > room for end in ends)
            for end in ends:
                load[end] = count + (load[end] if at[end] == number else 0)
                at[end] = number
            rounds += [[] for _ in range(number + 1 - len(rounds))]
            rounds[number].append(piece)
    return rounds
