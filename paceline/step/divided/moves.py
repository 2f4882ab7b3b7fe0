"""Transfer of a divided state to new shares: each worker gets the parts that it lacks from workers that hold them.

::

    shared memory   round k    senders: fill window k mod 2      receivers: copy from there into their new shares
    network         round k    a message for each pair of workers

A worker needs memory for its old share, its new share, and the rounds under way. Workers that share memory, and often
processors, wait for each other in each round, so they have few large rounds, and free the windows afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from paceline.comm.shm.arena import SharedMemory
from paceline.comm.shm.mapping import free_pages
from paceline.comm.shm.tensors import CACHE_LINE, Kinds, aligned, kinds_of
from paceline.comm.transport.base import Message
from paceline.comm.world import World
from paceline.schedule.moves import Move, Part, most_bytes, plan_moves, rounds_of
from paceline.schedule.slices import slice_name, split_name
from paceline.system import fault_points

ROUND_BYTES = 1 << 22  # bytes that a worker sends, or receives, in a round
_LARGEST_ROUND_BYTES, _ROUNDS = 1 << 24, 8
"""Bytes of a window, and the number of rounds above which the rounds in shared memory grow up to it."""
_TAG = (1 << 26) - 3


class NewShares(Protocol):
    """Division of a state into new shares."""

    def shape_of(self, name: str) -> torch.Size:
        """Return the shape of a tensor of which a worker holds a slice."""

    def parts_of(self, name: str, shape: torch.Size, rank: int) -> list[slice]:
        """Return the parts of a flattened tensor that a worker needs: none, all elements, or slices."""

    def target(self, name: str, part: slice, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """Return the memory for a part of a tensor that this worker needs, given the shape of the whole tensor."""


def move_shares(
    world: World, held: Mapping[str, torch.Tensor], shares: NewShares, what: str
) -> dict[str, torch.Tensor]:
    """Return the parts of the state that this worker needs, by name. All workers call this together.

    Args:
        held: tensors and slices of flattened tensors that this worker has, by name (``schedule.slices``). Together the
            workers have all that they need.
        what: purpose of the gather, for errors.

    Raises:
        WorkerLost: a worker was lost before this worker had all its parts.
    """
    kinds: Kinds = {}
    parts: dict[str, list[Part]] = {}
    everyone: list[Kinds] = world.gather(kinds_of(held), what)
    for rank, own in enumerate(everyone):
        for full, (dtype, shape) in own.items():
            name, cut = split_name(full)
            kinds.setdefault(name, (dtype, shares.shape_of(name) if cut else shape))
            parts.setdefault(name, []).append(Part(rank, cut.start if cut else 0, cut.stop if cut else shape.numel()))
    needed = {
        name: [
            Part(rank, one.start, one.stop) for rank in range(world.size) for one in shares.parts_of(name, shape, rank)
        ]
        for name, (_, shape) in kinds.items()
    }
    found = {
        full_name(name, one, shape): shares.target(name, one, dtype, shape)
        for name, (dtype, shape) in kinds.items()
        for one in shares.parts_of(name, shape, world.rank)
    }
    filled = {name: value if value.is_contiguous() else value.new_empty(value.shape) for name, value in found.items()}
    item_bytes = {name: dtype.itemsize for name, (dtype, _) in kinds.items()}
    with torch.no_grad():
        transfer = _Transfer(world, item_bytes, _Ranges(held), _Ranges(filled))
        transfer.run(plan_moves(parts, needed, item_bytes))
        for name, value in found.items():
            if value is not filled[name]:  # a tensor with other strides, such as channels_last, is never cut
                value.copy_(filled[name])
    return found


def full_name(name: str, part: slice, shape: torch.Size) -> str:
    """Return the name of a part of a flattened tensor, given the shape of the whole tensor."""
    return name if part.stop - part.start == shape.numel() else slice_name(name, part.start, part.stop)


class _Ranges:
    """Ranges of flattened tensors, by name."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._of: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for full, value in tensors.items():
            name, cut = split_name(full)
            self._of.setdefault(name, []).append((cut.start if cut else 0, value.detach().contiguous().view(-1)))

    def find(self, move: Move) -> torch.Tensor:
        return next(
            value[move.start - first : move.stop - first]
            for first, value in self._of[move.name]
            if first <= move.start and move.stop <= first + len(value)
        )


class _Windows:
    """Two windows of each worker in the memory that the workers share, for all transfers of a membership."""

    def __init__(self, memory: SharedMemory) -> None:
        self.rewound = memory.rewound
        size = 2 * _LARGEST_ROUND_BYTES
        blocks, self.flag = memory.share(size), memory.reserve(2)
        self.own = blocks[memory.place]
        self.of = [torch.frombuffer(block, dtype=torch.uint8, count=size).view(2, -1) for block in blocks]
        self.readers: list[set[int]] = [set(), set()]  # workers that read what this worker has written into a window
        self.rounds = 0


_WINDOWS: WeakKeyDictionary[SharedMemory, _Windows] = WeakKeyDictionary()


class _Transfer:
    """Transfer of elements of this worker's old share, and into its new share."""

    def __init__(self, world: World, item_bytes: Mapping[str, int], sources: _Ranges, targets: _Ranges) -> None:
        self._world, self._item_bytes, self._sources, self._targets = world, item_bytes, sources, targets

    def run(self, moves: Sequence[Move]) -> None:
        """Carry out a plan. Raises WorkerLost if a worker is lost on which this one depends."""
        room = ROUND_BYTES
        if self._world.shared_memory is not None:
            room = min(_LARGEST_ROUND_BYTES, max(room, most_bytes(moves, self._item_bytes) // _ROUNDS // room * room))
        rounds = rounds_of(moves, self._item_bytes, room, CACHE_LINE)
        kept = [move for move in moves if move.is_local and move.sender == self._world.rank]
        if rounds and self._world.shared_memory is not None:
            self._through_shared_memory(self._world.shared_memory, rounds, kept)
            return
        self._keep(kept)
        if rounds:
            self._over_network(rounds)

    def _keep(self, moves: Sequence[Move]) -> None:
        """Copy elements that stay on this worker."""
        for move in moves:
            target, source = self._targets.find(move), self._sources.find(move)
            if target.data_ptr() != source.data_ptr():  # else they stay where they are
                target.copy_(source)

    def _through_shared_memory(
        self, memory: SharedMemory, rounds: Sequence[Sequence[Move]], kept: Sequence[Move]
    ) -> None:
        if (windows := _WINDOWS.get(memory)) is None or windows.rewound != memory.rewound:
            windows = _WINDOWS[memory] = _Windows(memory)
        rank, flag = self._world.rank, windows.flag
        for place, moves in enumerate(rounds):
            number = windows.rounds = windows.rounds + 1
            at = number % 2
            if own := [move for move in moves if move.sender == rank]:
                memory.wait(flag + 1, number - 2, sorted(windows.readers[at]))
                self._pack(windows.of[rank][at], own)
                memory.announce(flag, number)
                windows.readers[at] = {one for move in own for one in move.receivers}
            self._keep(kept[place :: len(rounds)])  # while the others receive
            for sender in dict.fromkeys(move.sender for move in moves if rank in move.receivers):
                memory.wait(flag, number, [sender])
                self._unpack(windows.of[sender][at], [move for move in moves if move.sender == sender])
            memory.announce(flag + 1, number)
        memory.wait(flag + 1, windows.rounds, sorted(set().union(*windows.readers)))
        free_pages(windows.own)

    def _over_network(self, rounds: Sequence[Sequence[Move]]) -> None:
        world = self._world
        world.await_process_group()
        for moves in rounds:
            sends, receives = [], []
            sent: dict[tuple[Move, ...], torch.Tensor] = {}
            for peer in world.others:
                if own := tuple(move for move in moves if move.sender == world.rank and peer in move.receivers):
                    if own not in sent:
                        self._pack(sent.setdefault(own, self._new_buffer(own)), own)
                    sends.append(Message(sent[own], peer, _TAG))
                if coming := [move for move in moves if move.sender == peer and world.rank in move.receivers]:
                    receives.append((Message(self._new_buffer(coming), peer, _TAG), coming))
            messages = [message for message, _ in receives]
            for transfer in world.start_transfers(sends, messages, "while the workers moved the state"):
                transfer.wait()
            world.synchronize()
            for message, coming in receives:
                self._unpack(message.tensor, coming)

    def _bytes_of(self, move: Move) -> int:
        return (move.stop - move.start) * self._item_bytes[move.name]

    def _new_buffer(self, moves: Sequence[Move]) -> torch.Tensor:
        size = sum(aligned(self._bytes_of(move)) for move in moves)
        return torch.empty(size, dtype=torch.uint8, device=self._world.device)

    def _pack(self, buffer: torch.Tensor, moves: Sequence[Move]) -> None:
        start = 0
        for move in moves:
            value = self._sources.find(move)
            buffer[start : start + value.nbytes].view(value.dtype).copy_(value)
            start += aligned(value.nbytes)
        fault_points.reach("sending the state")

    def _unpack(self, buffer: torch.Tensor, moves: Sequence[Move]) -> None:
        """Copy those moves of a sender of which this worker is a receiver."""
        start = 0
        for move in moves:
            if self._world.rank in move.receivers:
                value = self._targets.find(move)
                value.copy_(buffer[start : start + value.nbytes].view(value.dtype))
            start += aligned(self._bytes_of(move))
