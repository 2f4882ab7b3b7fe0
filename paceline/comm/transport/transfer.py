"""Transfer in progress, with the ranks that it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from paceline.comm.transport.base import Work


class Waits(Protocol):
    """Interface of ``comm.world.World`` that :class:`Transfer` uses."""

    @property
    def others(self) -> list[int]:
        """Ranks of all other workers."""
        ...

    def waiting_in_group(self, ranks: Sequence[int], suspects: list[int], where: str) -> AbstractContextManager[None]:
        """See ``World.waiting_in_group``."""
        ...


class Transfer:
    """Send or receive in progress, or a collective of all workers if no peers are named."""

    __slots__ = ("_peers", "_where", "_work", "_world")

    def __init__(self, world: Waits, work: Work, peers: list[int], where: str) -> None:
        self._world = world
        self._work = work
        self._peers = peers
        self._where = where

    def wait(self) -> None:
        """Wait until the transfer is done. See :attr:`Capabilities.blocking_wait`.

        Raises:
            WorkerLost: the peer was lost, or sent nothing before the timeout.
        """
        with self._world.waiting_in_group(self._peers or self._world.others, self._peers, self._where):
            self._work.wait()
