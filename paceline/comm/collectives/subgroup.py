"""Subset of the workers with the part of World's interface that an exchange of tensors needs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from paceline.comm.transport.base import Message
from paceline.comm.transport.gather import all_gather_bytes
from paceline.comm.values import decode, encode
from paceline.comm.waiting import Transfer
from paceline.comm.world import World


class Subgroup:
    """Some of the workers. ``ranks``: ranks of the subgroup, including this worker's."""

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self._world = world
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(world.rank)  # rank of this worker in the subgroup
        self.size = len(self.ranks)  # number of workers in the subgroup

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def device(self) -> torch.device:
        return self._world.device

    def awaiting(self, purpose: str) -> AbstractContextManager[None]:
        return self._world.awaiting(purpose)

    def receiving(self) -> AbstractContextManager[None]:
        return self._world.receiving()

    def check(self) -> None:
        self._world.check()

    def gather(self, value: Any, what: str) -> list[Any]:
        """See :meth:`World.gather`."""
        with self.awaiting(f"in a gather of some workers ({what})"):
            return [decode(one) for one in all_gather_bytes(self, encode(value))]

    def start_transfers(self, sends: list[Message], receives: list[Message], *, host: bool = False) -> list[Transfer]:
        """See :meth:`World.start_transfers`. Peers are ranks of the subgroup."""
        given, wanted = [self._outside(one) for one in sends], [self._outside(one) for one in receives]
        return self._world.start_transfers(given, wanted, host=host)

    def _outside(self, message: Message) -> Message:
        return Message(message.tensor, self.ranks[message.peer], message.tag)
