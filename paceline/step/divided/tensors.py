"""Tensors of which each worker has some, or slices of some: assembled one by one, where they are needed.

::

    worker 0   a[0:64], b        round 1: a        round 2: b, c      A round moves the bytes of ROUND_BYTES,
    worker 1   a[64:128], c      a on worker 0     b, c on worker 0   or of one larger tensor.

So no worker needs room for more than its own tensors and those of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from paceline.comm.shm.tensors import Kinds, kinds_of, room_of, views_of
from paceline.comm.transport.base import Message
from paceline.comm.world import World
from paceline.schedule.slices import split_name

ROUND_BYTES = 1 << 22  # bytes that a round moves at most, unless a single tensor has more
_TAG = (1 << 26) - 1


class Part(NamedTuple):
    """Part of a tensor, which is the whole tensor if the name has no slice."""

    owner: int
    name: str
    dtype: torch.dtype
    shape: torch.Size


class Division:
    """Holders of the parts of tensors. All workers make it together.

    Args:
        mine: this worker's tensors and slices of flattened tensors, by name (``schedule.slices``).
        shape_of: function that returns the shape of a tensor from its name. Called for tensors in slices.
        what: purpose of the gather, for errors.

    Attributes:
        kinds: type and shape of each whole tensor.
        parts: parts of each tensor. If several workers have a tensor or the same slice, that of the lowest rank.
    """

    def __init__(
        self, world: World, mine: Mapping[str, torch.Tensor], shape_of: Callable[[str], torch.Size], what: str
    ) -> None:
        self._world, self._mine, self._what = world, mine, what
        self.kinds: Kinds = {}
        self.parts: dict[str, list[Part]] = {}
        everyone: list[Kinds] = world.gather(kinds_of(mine), what)
        for owner, kinds in enumerate(everyone):
            for name, (dtype, shape) in kinds.items():
                whole, cut = split_name(name)
                known = self.parts.setdefault(whole, [])
                if all(one.name not in (name, whole) for one in known):
                    self.parts[whole] = [*(known if cut else ()), Part(owner, name, dtype, shape)]
                    self.kinds[whole] = dtype, shape_of(whole) if cut else shape

    def owner_of(self, name: str) -> int:
        """Return the worker with the most elements of a tensor. Tensors in equal slices take turns."""
        elements: dict[int, int] = {}
        for part in self.parts[name]:
            elements[part.owner] = elements.get(part.owner, 0) + part.shape.numel()
        most = [rank for rank, count in elements.items() if count == max(elements.values())]
        return most[sum(name.encode()) % len(most)]

    def put_together(
        self, names: Sequence[str], targets: Callable[[str], Collection[int]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that this worker is to have, in order. All workers iterate to the end, with the same names.

        A tensor that this worker has whole is yielded itself, and others are valid until the next one.

        Args:
            targets: function that returns the ranks that are to have a tensor.

        Raises:
            WorkerLost: a worker was lost before all tensors were sent.
        """
        self._world.await_process_group()
        rank = self._world.rank
        for group in self._rounds(names):
            wanted = {name: targets(name) for name in group}
            if self._bytes_of(group[0]) > ROUND_BYTES and split_name(self.parts[group[0]][0].name)[1] is not None:
                received = self._receive_large(group[0], wanted[group[0]])
            else:
                received = self._transfer(wanted)
            for name in group:
                if rank in wanted[name]:
                    yield name, received[name] if name in received else self._whole(name, received)
            received.clear()  # before the next round

    def _bytes_of(self, name: str) -> int:
        return room_of({name: self.kinds[name]})

    def _receive_large(self, name: str, ranks: Collection[int]) -> dict[str, torch.Tensor]:
        """Receive the slices of a tensor in its memory, where it is wanted: a large tensor has no room for a copy."""
        rank, parts, (dtype, shape) = self._world.rank, self.parts[name], self.kinds[name]
        own = [self._mine[part.name].contiguous() for part in parts if part.owner == rank]
        sends = [Message(value, peer, _TAG) for peer in sorted(ranks) if peer != rank for value in own]
        receives, received = [], {}
        if rank in ranks:
            received[name] = torch.empty(shape, dtype=dtype, device=self._world.device)
            for part in parts:
                target = received[name].view(-1)[split_name(part.name)[1]]
                if part.owner == rank:
                    target.copy_(self._mine[part.name])
                else:
                    receives.append(Message(target, part.owner, _TAG))
        self._await(sends, receives)
        return received

    def _await(self, sends: list[Message], receives: list[Message]) -> None:
        for transfer in self._world.start_transfers(sends, receives, "while the workers gathered the state"):
            transfer.wait()
        self._world.synchronize()

    def _rounds(self, names: Sequence[str]) -> Iterator[list[str]]:
        group: list[str] = []
        room = 0
        for name in names:
            size = self._bytes_of(name)
            if group and room + size > ROUND_BYTES:
                yield group
                group, room = [], 0
            group.append(name)
            room += size
        if group:
            yield group

    def _transfer(self, wanted: Mapping[str, Collection[int]]) -> dict[str, torch.Tensor]:
        """Send parts to the workers that want them, and return the parts that this worker wants and does not have."""
        world = self._world
        sent: dict[tuple[str, ...], list[int]] = {}
        for peer in range(world.size):
            if names := tuple(self._moved(wanted, world.rank, peer)):
                sent.setdefault(names, []).append(peer)
        sends = []
        for names, peers in sent.items():
            kinds = kinds_of({name: self._mine[name] for name in names})
            flat = torch.empty(room_of(kinds), dtype=torch.uint8, device=world.device)
            for name, view in views_of(flat, kinds).items():
                view.copy_(self._mine[name])
            sends += [Message(flat, peer, _TAG) for peer in peers if len(flat)]
        coming = {peer: self._moved(wanted, peer, world.rank) for peer in range(world.size)}
        flats = {
            peer: torch.empty(room_of(kinds), dtype=torch.uint8, device=world.device)
            for peer, kinds in coming.items()
            if kinds
        }
        receives = [Message(flat, peer, _TAG) for peer, flat in flats.items() if len(flat)]
        self._await(sends, receives)
        return {name: view for peer, flat in flats.items() for name, view in views_of(flat, coming[peer]).items()}

    def _moved(self, wanted: Mapping[str, Collection[int]], sender: int, receiver: int) -> Kinds:
        """Return the types and shapes of the parts that one worker sends to another in a round."""
        if sender == receiver:
            return {}
        return {
            part.name: (part.dtype, part.shape)
            for name, ranks in wanted.items()
            if receiver in ranks
            for part in self.parts[name]
            if part.owner == sender
        }

    def _whole(self, name: str, received: Mapping[str, torch.Tensor]) -> torch.Tensor:
        parts = self.parts[name]
        values = [(self._mine if part.owner == self._world.rank else received)[part.name] for part in parts]
        cuts = [split_name(part.name)[1] for part in parts]
        if cuts[0] is None:
            return values[0]
        dtype, shape = self.kinds[name]
        whole = torch.empty(shape, dtype=dtype, device=self._world.device)
        for cut, value in zip(cuts, values, strict=True):
            whole.view(-1)[cut] = value
        return whole
