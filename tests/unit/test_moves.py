"""Parts of a divided state go to their new holders: each element once, from a worker that has it, in small rounds."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from thread_world import run

from paceline.schedule.moves import Move, Part, plan_moves, rounds_of
from paceline.schedule.slices import Slice, even, slice_name
from paceline.step.divided import moves as divided_moves
from paceline.step.divided.moves import move_shares

SIZES = [5000, 64, 1, 700]
BYTES = {str(index): 4 if index else 8 for index in range(len(SIZES))}


def held_by(slices: list[Slice], workers: int, copies: bool) -> list[Part]:
    """A copy of each slice is on the next worker."""
    ranks = {one: {one.owner, (one.owner + copies) % workers} for one in slices}
    return [Part(rank, one.start, one.stop) for one in slices for rank in ranks[one]]


def division(workers: int, copies: bool) -> dict[str, list[Part]]:
    slices = even(SIZES, [[3, 2], [1, 0]], workers)
    return {
        str(index): held_by([one for one in slices if one.parameter == index], workers, copies)
        for index in range(len(SIZES))
    }


def covered(parts: list[Part], rank: int) -> set[int]:
    return {at for one in parts if one.rank == rank for at in range(one.start, one.stop)}


@pytest.mark.parametrize("lost", [1, None], ids=["a loss", "a joiner"])
def test_each_worker_gets_what_it_lacks_once(lost: int | None) -> None:
    """After a loss the ranks of the others change; a worker that joins is the last rank, and holds nothing."""
    before, after = (4, 3) if lost is not None else (3, 4)
    now = {rank: place for place, rank in enumerate(rank for rank in range(before) if rank != lost)}
    old = {
        name: [one._replace(rank=now[one.rank]) for one in parts if one.rank in now]
        for name, parts in division(before, True).items()
    }
    new = division(after, True)
    moves, sent = plan_moves(old, new, BYTES), Counter[int]()
    got: dict[tuple[str, int], list[int]] = defaultdict(list)
    for move in moves:
        assert set(range(move.start, move.stop)) <= covered(old[move.name], move.sender)
        for rank in move.receivers:
            got[move.name, rank] += range(move.start, move.stop)
            held = covered(old[move.name], rank)
            assert move.is_local or not held.intersection(range(move.start, move.stop)), "it has them"
        if not move.is_local:
            sent[move.sender] += (move.stop - move.start) * BYTES[move.name]
    for name, parts in new.items():
        for rank in range(after):
            assert sorted(got[name, rank]) == sorted(covered(parts, rank)), (name, rank)
    moved = sum(
        len(covered(parts, rank) - covered(old[name], rank)) * BYTES[name]
        for name, parts in new.items()
        for rank in range(after)
    )
    assert sum(sent.values()) <= moved
    assert max(sent.values()) < 0.6 * sum(sent.values()), "the holders take turns"


def test_rounds_are_small_and_complete() -> None:
    draw = random.Random(0)
    for _ in range(200):
        moves = []
        for name in BYTES:
            start = draw.randrange(100)
            for stop in sorted(draw.sample(range(start + 1, 4000), 5)):
                sender, *receivers = draw.sample(range(5), draw.randrange(2, 5))
                moves.append(Move(name, start, stop, sender, tuple(receivers)))
                start = stop
        rounds = rounds_of([*moves, Move("0", 0, 9, 1, (1,))], BYTES, 1024, 64)
        pieces: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for group in rounds:
            load = Counter[tuple[str, int]]()
            for move in group:
                pieces[move.name].append((move.start, move.stop))
                size = -(-(move.stop - move.start) * BYTES[move.name] // 64) * 64
                load["sent", move.sender] += size
                load.update({("received", rank): size for rank in move.receivers})
                (found,) = [one for one in moves if one.name == move.name and one.start <= move.start < one.stop]
                assert (move.sender, move.receivers) == found[3:] and move.stop <= found.stop
            assert max(load.values()) <= 1024
        for name in BYTES:
            wanted = [at for one in moves if one.name == name for at in range(one.start, one.stop)]
            assert sorted(at for start, stop in pieces[name] for at in range(start, stop)) == sorted(wanted)
        most = Counter[tuple[str, int]]()
        for move in moves:
            size = (move.stop - move.start) * BYTES[move.name]
            most["sent", move.sender] += size
            most.update({("received", rank): size for rank in move.receivers})
        assert len(rounds) <= 3 * sum(most.values()) // 1024 + 3


class Shares:
    """The new division. Tensor 0 is not contiguous."""

    def __init__(self, rank: int, new: dict[str, list[Part]]) -> None:
        self._new = new
        self.wide = torch.zeros(50, 100, dtype=torch.float64).t()

    def shape_of(self, name: str) -> torch.Size:
        return torch.Size([SIZES[int(name)]])

    def parts_of(self, name: str, shape: torch.Size, rank: int) -> list[slice]:
        if not self._new[name]:
            return [slice(0, shape.numel())]
        return [slice(one.start, one.stop) for one in self._new[name] if one.rank == rank]

    def target(self, name: str, part: slice, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        whole = part.stop - part.start == shape.numel()
        return self.wide if name == "0" else torch.empty(shape if whole else (part.stop - part.start,), dtype=dtype)


@pytest.mark.parametrize("hosts", [None, [(0, 1, 2)]], ids=["network", "memory"])
def test_tensors_move(hosts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor 0 has other strides, and goes whole from rank 0 to all; rank 2 has joined.

    In shared memory, in which they wait for each other, the rounds are larger and few.
    """
    monkeypatch.setattr(divided_moves, "ROUND_BYTES", 1024)
    buffers: list[int] = []
    rounds: list[int] = []
    new_buffer = divided_moves._Transfer._new_buffer

    def counted(*given: Any) -> list[list[Move]]:
        rounds.append(len(found := rounds_of(*given)))
        return found

    monkeypatch.setattr(divided_moves, "rounds_of", counted)

    def recorded(transfer: Any, moves: Any) -> torch.Tensor:
        buffers.append(len(found := new_buffer(transfer, moves)))
        return found

    monkeypatch.setattr(divided_moves._Transfer, "_new_buffer", recorded)
    values = [torch.arange(size, dtype=torch.float32) + 0.5 for size in SIZES]
    first = torch.arange(5000, dtype=torch.float64).view(50, 100).t()
    old, new = division(2, False), division(3, True)
    old["0"], new["0"] = [], []

    def act(world: Any) -> dict[str, torch.Tensor]:
        held = {
            slice_name(name, one.start, one.stop): values[int(name)][one.start : one.stop].clone()
            for name, parts in old.items()
            for one in parts
            if one.rank == world.rank
        }
        held |= {"0": first} if world.rank == 0 else {}
        shares: Any = Shares(world.rank, new)
        return move_shares(world, held, shares, "a test")

    for rank, found in enumerate(run(3, act, hosts, blocking_wait=hosts is not None)):
        assert torch.equal(found.pop("0"), first)
        wanted = {
            str(index) if one.stop - one.start == SIZES[index] else slice_name(str(index), one.start, one.stop): values[
                index
            ][one.start : one.stop]
            for index in range(1, len(SIZES))
            for one in new[str(index)]
            if one.rank == rank
        }
        assert found.keys() == wanted.keys()
        assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    assert bool(hosts) == (not buffers) and all(size <= 1024 for size in buffers)
    assert bool(hosts) == (max(rounds) < 20)
