"""Averages of weights in shares, put into the weights of all workers for an evaluation or an export.

::

    worker 0   keep weights 0, give average 0 ┐                       ┌ give weights 0 ┐
    worker 1   keep weights 1, give average 1 ┼ evaluation, export ───┼ give weights 1 ┼
    worker 2   keep weights 2, give average 2 ┘                       └ give weights 2 ┘

A worker needs memory for a copy of the weights in its share. With shared weights, nothing is sent on one machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from paceline.checkpoint.weights.averages import KEY
from paceline.comm.world import World
from paceline.errors import WorkerLost
from paceline.step.divided.moves import move_shares
from paceline.strategies.sharded.prepared import PreparedShards

_DOING = "synchronizing"


class DividedAverages:
    """Averages of the slices that this worker holds."""

    def __init__(self, world: World, division: PreparedShards) -> None:
        self._world, self._division, self._shard = world, division, division.shard
        self._kept: dict[int, torch.Tensor] = {}  # weights of the held slices while the averages are in place

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averages into the weights, and restore these afterwards. All workers call this together."""
        averages, weights = self._shard.entries(KEY), self._division.weights
        if weights is not None:
            weights.look()
            weights.publish()
            weights.take()
        self._kept = {index: self._shard.own[index].detach().clone() for index in averages}
        try:
            self._give({index: value.to(self._kept[index].dtype) for index, value in averages.items()})
            yield
        except WorkerLost:  # the others send nothing more
            raise
        except Exception:
            self._give_back()
            raise
        self._give_back()

    def _give_back(self) -> None:
        self._give(self._kept)
        self._kept = {}

    def _give(self, values: Mapping[int, torch.Tensor]) -> None:
        """Put values of the held slices into the weights of all workers, when all have stopped using these."""
        named = {f"parameter/{self._shard.name_of(self._division.slices[index])}": one for index, one in values.items()}
        move_shares(self._world, named, self._division, _DOING)
        if self._division.weights is not None:
            self._division.weights.publish()

    def restore(self) -> bool:
        """Restore the weights of the held slices after a loss. Return whether other weights may still be averages."""
        for index, value in self._kept.items():
            self._shard.own[index].detach().copy_(value)
        return bool(self._kept)
