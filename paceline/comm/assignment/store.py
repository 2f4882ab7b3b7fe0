"""The store at which the workers of ``torch.distributed`` met, for questions among workers on several machines."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from paceline.comm.world import World

_T = TypeVar("_T")


class Store:
    """Keys that no other use of the store has, and errors in the words of this package; a question is a round trip.

    Args:
        world: the workers.
        purpose: the first part of each key.
        where: what the workers do with it, for an error: ``while they ...``.
    """

    def __init__(self, world: World, purpose: str, where: str) -> None:
        self._world = world
        self._store = dist.distributed_c10d._get_default_store()
        self._purpose = purpose
        self._where = where
        self._token = ""

    @property
    def is_open(self) -> bool:
        """Whether the keys are this object's own."""
        return bool(self._token)

    def open(self) -> None:
        """Agree on keys of its own: another session in these processes may have had the same steps. All call this."""
        self._token = self._world.gather(os.urandom(8).hex(), "step")[0]

    def key(self, *parts: object) -> str:
        """A key of this use."""
        return "/".join(map(str, ("paceline", self._purpose, self._token, *parts)))

    def ask(self, question: Callable[[dist.distributed_c10d.Store], _T]) -> _T:
        """Ask the store, whose worker may be gone.

        Raises:
            WorkerLost: it is, or another worker was lost.
        """
        self._world.check()
        try:
            return question(self._store)
        except RuntimeError as error:
            raise self._world.lost([], self._where, error) from error
