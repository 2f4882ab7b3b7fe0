"""Embedding whose table is many parameters, so that no worker ever needs memory for the whole table.

::

    table    block 0   rows 0 to 131,071         each block is a parameter: it is built, divided among the workers,
             block 1   rows 131,072 to 262,143   hashed, saved and read by itself
             ...

With several machines, a source of rows stands for the memory of the blocks, which then only have a shape
(``strategies.sharded.pulled_rows``).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn

from paceline.errors import InputError

_BLOCK_ELEMENTS = 1 << 22


class RowSource(Protocol):
    """Rows of a table, some of which are on other machines."""

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the rows at sorted indices without duplicates."""

    def check(self) -> None:
        """Raise InputError if the rows can no longer be read."""


def without_memory(like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a shape and type whose elements are all one NaN."""
    return torch.full((1,), torch.nan, dtype=like.dtype).expand(like.shape)


class SparseEmbedding(nn.Module):
    """Embedding with sparse gradients for tables that are larger than the memory of a worker, or of a machine.

    Each index is replaced by its row, as in :class:`torch.nn.Embedding`. The initial values are normally distributed.

    Args:
        rows: number of rows.
        width: number of elements of a row.
        block: number of rows in a block. Defaults to blocks of 4,194,304 elements. A different number
            gives different initial values, and different names in checkpoints.

    Examples:
        >>> import paceline, torch
        >>> table = paceline.SparseEmbedding(1_000, 4, block=300)
        >>> table(torch.tensor([[0, 999, 0]])).shape, len(table.blocks)
        (torch.Size([1, 3, 4]), 4)

    Raises:
        InputError: a size is not positive, or in the forward pass, an index is not in the table.
    """

    def __init__(self, rows: int, width: int, block: int | None = None) -> None:
        super().__init__()
        block = max(1, _BLOCK_ELEMENTS // max(width, 1)) if block is None else block
        for name, size in (("rows", rows), ("width", width), ("block", block)):
            if size < 1:
                raise InputError(f"paceline.SparseEmbedding({name}={size}) needs at least 1.")
        self.rows: int = rows
        self.width: int = width
        self._starts = [*range(0, rows, block), rows]
        sizes = [stop - start for start, stop in pairwise(self._starts)]
        self.blocks: nn.ParameterList = nn.ParameterList(
            nn.Parameter(torch.empty(size, width).normal_()) for size in sizes
        )
        self.source: RowSource | None = None  # of the rows while several machines have them
        self.register_state_dict_post_hook(_with_rows)  # type: ignore[no-untyped-call]

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the rows at these indices."""
        unique, places = indices.unique(return_inverse=True)
        if len(unique) and not 0 <= int(unique[0]) <= int(unique[-1]) < self.rows:
            wrong = int(unique[0]) if int(unique[0]) < 0 else int(unique[-1])
            raise InputError(
                f"The index {wrong} is not in a table of {self.rows:,} rows (0 to {self.rows - 1:,}). Look at the data "
                f"of this step, or set rows of paceline.SparseEmbedding to more."
            )
        rows: torch.Tensor = _Rows.apply(unique, self._starts, self.source, *self.blocks)  # type: ignore[no-untyped-call]
        return nn.functional.embedding(places, rows)

    def extra_repr(self) -> str:
        return f"{self.rows}, {self.width}"


def hold_rows(model: nn.Module) -> None:
    """Give tables whose rows are on several machines memory for all rows, which have no values then."""
    for table in model.modules():
        if isinstance(table, SparseEmbedding) and table.source is not None:
            table.source = None
            for block in table.blocks:
                block.data = torch.empty(block.shape, dtype=block.dtype)


def _with_rows(table: SparseEmbedding, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Put the values of all rows into a state_dict."""
    if (source := table.source) is not None:
        for number, (start, stop) in enumerate(pairwise(table._starts)):
            state[f"{prefix}blocks.{number}"] = source(torch.arange(start, stop))


class _Rows(torch.autograd.Function):
    """Rows of the blocks at sorted indices without duplicates. The gradient of each block is sparse."""

    @staticmethod
    def forward(
        ctx: Any, indices: torch.Tensor, starts: list[int], source: RowSource | None, *blocks: torch.Tensor
    ) -> torch.Tensor:
        ends = torch.searchsorted(indices, indices.new_tensor(starts)).tolist()
        ctx.parts = [
            (indices[begin:end] - start, begin, end)
            for start, (begin, end) in zip(starts, pairwise(ends), strict=False)
        ]
        ctx.shapes = [one.shape for one in blocks]
        if source is not None:
            return source(indices)
        rows = blocks[0].new_empty(len(indices), blocks[0].shape[1])
        for block, (local, begin, end) in zip(blocks, ctx.parts, strict=True):
            if begin < end:
                torch.index_select(block, 0, local, out=rows[begin:end])
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        sums = [
            torch.sparse_coo_tensor(
                local.unsqueeze(0), gradient[begin:end], shape, is_coalesced=True, check_invariants=False
            )
            for (local, begin, end), shape in zip(ctx.parts, ctx.shapes, strict=True)
        ]
        return None, None, None, *sums
