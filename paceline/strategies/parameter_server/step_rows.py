"""Rows of tables that a step uses, pulled from servers on other machines just before the forward pass reads them.

::

    worker 1   pull dense weights ─ forward of a table: rows 3, 7 ─ pull 3, 7 ┐      ┌ row 3, 7 ── loss ─ rows 3, 7 ┐
    server 0                                                                  └ read ┘                       update ┘

A worker keeps the whole table, in which the rows that it has not pulled in a step are old. A row is pulled once in a
step, so its value stays the same from the first microbatch to the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.checkpoint.weights.sparse_embedding import SparseEmbedding
from paceline.errors import InputError


class StepRows:
    """Puts the rows that each embedding of a model reads into its tables.

    Args:
        homes: shard and index in the shard of each table.
        pull: returns the bytes of rows by shard. Called with indices of rows by shard and index in the shard.
    """

    def __init__(
        self,
        model: nn.Module,
        homes: Mapping[nn.Parameter, tuple[int, int]],
        pull: Callable[[Mapping[int, Mapping[int, torch.Tensor]]], Mapping[int, bytearray]],
    ) -> None:
        self._homes, self._pull = homes, pull
        found = {module: _tables_of(module) for module in model.modules()} if homes else {}
        self._modules = {module: tables for module, tables in found.items() if any(one in homes for one in tables)}
        self._hooks: list[RemovableHandle] = []
        self._pulled: dict[nn.Parameter, torch.Tensor] = {}  # indices of the rows that were pulled in this step

    def begin(self) -> None:
        """Begin a step, in which no row has been pulled yet."""
        self.end()
        self._pulled = {table: torch.empty(0, dtype=torch.int64) for table in self._homes}
        self._hooks = [one.register_forward_pre_hook(self._before, with_kwargs=True) for one in self._modules]

    def end(self) -> None:
        """Pull no more rows: forward passes read the tables as they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def check(self, name: str, table: nn.Parameter, rows: torch.Tensor) -> None:
        """Raise InputError if a gradient has rows that the forward pass has read without pulling them."""
        if not torch.isin(rows, self._pulled[table]).all():
            raise InputError(
                f"The parameter {name!r} has gradients for rows that are not among the indices its module was called "
                f"with, so they were not pulled from the servers: call the module itself, not its forward(), with the "
                f"indices of the rows as its first argument, or use server.mode = 'sync' or sparse=False."
            )

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        indices = next(iter((*args, *kwargs.values())), None)
        if not isinstance(indices, torch.Tensor) or indices.is_floating_point():
            return  # the module refuses it, or has rows of its own choice, which :meth:`check` refuses
        tables, unique = self._modules[module], indices.detach().unique()
        starts = [*accumulate(map(len, tables), initial=0)]
        ends = torch.searchsorted(unique, unique.new_tensor(starts)).tolist()  # without indices that are in no table
        wanted: dict[int, dict[int, torch.Tensor]] = {}
        targets: dict[tuple[int, int], tuple[nn.Parameter, torch.Tensor]] = {}
        for table, start, (first, last) in zip(tables, starts, pairwise(ends), strict=False):
            if first == last or table not in self._homes:
                continue
            rows = unique[first:last].to(torch.int64) - start
            rows = rows[~torch.isin(rows, self._pulled[table])]
            if len(rows):
                place, index = home = self._homes[table]
                wanted.setdefault(place, {})[index] = rows.to(torch.int32)
                targets[home] = table, rows
        for place, data in self._pull(wanted).items() if wanted else ():
            taken = 0
            for index in wanted[place]:
                table, rows = targets[place, index]
                shape = len(rows), *table.shape[1:]
                values = torch.frombuffer(data, dtype=table.dtype, count=math.prod(shape), offset=taken)
                table.data[rows] = values.view(shape)
                taken += values.nbytes
                self._pulled[table] = torch.cat((self._pulled[table], rows))


def _tables_of(module: nn.Module) -> list[nn.Parameter]:
    if isinstance(module, SparseEmbedding):
        return [*module.blocks]
    return [module.get_parameter("weight")] if isinstance(module, nn.Embedding | nn.EmbeddingBag) else []
