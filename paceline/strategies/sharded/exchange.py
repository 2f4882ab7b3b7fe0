"""Exchange of gradients and weights between the owners of slices and the other workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from paceline.comm.reduction.direct import DirectExchange
from paceline.comm.reduction.exchange import Exchange
from paceline.comm.reduction.executor import Reduction
from paceline.comm.reduction.shared_memory import SharedMemoryExchange
from paceline.schedule.tree import Node
from paceline.step.context import TrainingContext
from paceline.step.gradients.formats import codec_for
from paceline.strategies.data_parallel.gradient_groups import Slices
from paceline.strategies.data_parallel.reducer import Reducer
from paceline.strategies.sharded.shards import part_of
from paceline.strategies.sharded.tables import Tables

_TAGS = 1 << 12
"""First tag of the gradients, the same as in all-reduce."""


class SliceExchange:
    """Exchange of all slices but those of tables.

    Args:
        context: training context.
        tables: the tables, which have an exchange of their own.
        parts: the slices, in the order of the division.
        copies: for each owner the workers that keep copies of its slices.
        receivers: for each owner the workers to which it sends new weights.
        shares_weights: whether the workers of a machine share the weights.

    Attributes:
        reducer: reducer of the gradients.
    """

    def __init__(
        self,
        context: TrainingContext,
        tables: Tables,
        parts: Sequence[torch.Tensor],
        copies: Mapping[int, Sequence[int]],
        receivers: Mapping[int, Sequence[int]],
        shares_weights: bool,
    ) -> None:
        self._world, slices = context.world, tables.slices_of_others
        self._copies, self._receivers = copies, receivers
        codec = codec_for(context, tables.others, slices=slices)
        homes = [one.owner for one in slices]
        sums = parts = list(parts[: tables.first])
        if codec is not None:
            examples, slices = codec.examples(), codec.slices(slices)
            sums = [part_of(examples[one.parameter], one) for one in slices]
        widen = codec is not None and not context.settings.along_tree
        windowed = context.settings.shard != "optimizer"
        self._gradients = self._weights = self._reduction(context, sums, "gradients", homes, windowed, widen)
        if codec is not None and (not shares_weights or len(self._world.hosts) > 1):  # weights are wider than such sums
            self._weights = self._reduction(context, parts, "weights", homes, True, widen)
        self.reducer = Reducer(context, tables.others, reduction=self._gradients, slices=Slices(slices, codec))

    def _reduction(
        self,
        context: TrainingContext,
        tensors: list[torch.Tensor],
        what: str,
        homes: list[int],
        windowed: bool,
        widen: bool,
    ) -> Reduction:
        world, megabytes = self._world, context.settings.bucket_megabytes
        exchange: Exchange
        if world.shared_memory is None:
            exchange = DirectExchange(
                world, _TAGS, homes=homes, copies=self._copies, windowed=windowed, spread=self._receivers
            )
        else:
            exchange = SharedMemoryExchange(world.shared_memory, homes, windowed, self._copies)
        size = None if megabytes is None else int(megabytes * 1e6)
        found = Reduction(world, exchange, tensors, context.events, what, size, widen)
        context.events.mark("reduction", what=what, **found.describe())
        return found

    def spread(self, weights: Mapping[int, torch.Tensor], take: Callable[[int, torch.Tensor], None]) -> None:
        """Send the weights of own slices, by index, and call ``take`` with those of others."""
        if self._weights is not self._gradients:
            self._weights.begin([[Node(0, rank)] for rank in range(self._world.size)])
        for index, value in weights.items():
            self._weights.mean(index).copy_(value)
        self._weights.spread(take)

    def close(self) -> None:
        self._gradients.close()
        self._weights.close()
