"""Access to the default store of ``torch.distributed``, for assignment among workers on several machines."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from paceline.comm.world import World
from paceline.system.torch_internals import default_store

_T = TypeVar("_T")


class Store:
    """Store with private keys, which raises this package's errors. Each access is a round trip.

    Args:
        purpose: name of this use of the store, which every key contains.
        where: activity of the workers, for error messages, in the form ``while they ...``.
    """

    def __init__(self, world: World, purpose: str, where: str) -> None:
        self._world = world
        self._store = default_store()
        self._purpose = purpose
        self._where = where
        self._token = ""

    @property
    def is_open(self) -> bool:
        """Whether :meth:`open` has made the keys private."""
        return bool(self._token)

    def open(self) -> None:
        """Agree on a token for the keys, as an earlier session may have used the same steps. All workers call this."""
        self._token = self._world.gather(os.urandom(8).hex(), "step")[0]

    def key(self, *parts: object) -> str:
        return "/".join(map(str, ("paceline", self._purpose, self._token, *parts)))

    def ask(self, question: Callable[[dist.distributed_c10d.Store], _T]) -> _T:
        """Call ``question`` with the store and return its answer."""
        self._world.check()
        try:
            return question(self._store)
        except RuntimeError as error:
            raise self._world.lost([], self._where, error) from error
