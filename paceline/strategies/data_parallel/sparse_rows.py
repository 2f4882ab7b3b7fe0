"""Means of sparse gradients, such as those of ``nn.Embedding(sparse=True)``: workers send the rows that they touched.

::

    worker 0   microbatches 0, 1   rows 3, 7, 9   ┐
    worker 1   microbatches 2, 3   rows 3, 8      ┴ all rows to all ─ sum along the tree ─ .grad has rows 3, 7, 8, 9

Each worker sends the sum of each of its tree nodes to all others, and all add them up alike, row by row. So with
``exact`` the mean has the same bits for any number of workers. A worker without a row adds nothing to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from paceline.comm.collectives.all_gather import AllGather
from paceline.comm.collectives.step_header import ROWS_TAG
from paceline.comm.reduction.division import Divisor, divide_all
from paceline.comm.transport.base import Message
from paceline.schedule.tree import Node, first_of, total
from paceline.settings import Exact
from paceline.step.checks import sparse_gradient
from paceline.step.context import TrainingContext
from paceline.step.gradients.accumulate import Accumulator, Values, add

_TAGS = 1 << 26
_NO_GRADIENT = -1


class Section(NamedTuple):
    """Rows of a table whose mean gradients some ranks need."""

    table: int  # index of the parameter
    rows: range
    ranks: Sequence[int]


class SparseRows:
    """Exchange of the sparse gradients of a step.

    Args:
        context: training context.
        parameters: parameters with sparse gradients.
        most: largest number of tree nodes of a worker in a step.
        sections: sections of the tables, whose means :meth:`finish` then leaves in ``means``. By default each worker
            gets all means, in ``.grad``.

    Attributes:
        missing: for each microbatch of a step, the indices of the parameters to which it gave no gradient.
        means: means of the sections that this worker needs, by index. None if no microbatch gave a gradient.
    """

    def __init__(
        self,
        context: TrainingContext,
        parameters: Mapping[str, nn.Parameter],
        most: int,
        sections: Sequence[Section] | None = None,
    ) -> None:
        self._world, self._most = context.world, most
        self._parameters, self._in_sections = dict(parameters), sections is not None
        everyone = range(context.world.size)
        whole = [Section(at, range(one.shape[0]), everyone) for at, one in enumerate(parameters.values())]
        self._sections = whole if sections is None else [*sections]
        self._counts = AllGather(context.world, ROWS_TAG, 8 * most * len(self._sections), host=True)
        self.missing: list[list[int]] = []
        self.means: dict[int, torch.Tensor | None] = {}

    def begin(self, exact: Exact) -> None:
        """Start a step."""
        self._sums, self.missing = Accumulator(exact), []
        self.clear()

    def clear(self) -> None:
        """Release the gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def push(self, microbatch: int) -> None:
        """Take the gradients of a microbatch."""
        values: Values = []
        for name, parameter in self._parameters.items():
            values.append(None if parameter.grad is None else sparse_gradient(name, parameter.grad))
        self.clear()
        self.missing.append([place for place, value in enumerate(values) if value is None])
        self._sums.push(microbatch, values)

    def finish(self, nodes: Sequence[Sequence[Node]], divisor: Divisor) -> None:
        """Exchange the rows, and put the means into ``.grad``. All workers call this.

        Args:
            nodes: for each rank, the nodes whose sums it sends.
            divisor: divisor of all sums.
        """
        world, tables = self._world, [*self._parameters.values()]
        own = [[_section(values[one.table], one.rows) for one in self._sections] for _, values in self._sums.nodes()]
        counts = torch.full((self._most, len(self._sections)), _NO_GRADIENT, dtype=torch.int64)
        for row, values in enumerate(own):
            counts[row] = torch.tensor([_NO_GRADIENT if one is None else one.values().shape[0] for one in values])
        table = self._counts.start(counts).wait().tolist()
        rows = [
            _Rows(
                _TAGS + 2 * at, tables[one.table], one, [[row[at] for row in of_rank] for of_rank in table], world.rank
            )
            for at, one in enumerate(self._sections)
        ]
        sends, receives = list[Message](), list[Message]()
        for at, part in enumerate(rows):
            part.fill([values[at] for values in own])
            sends += [message for peer in world.others for message in part.sends(peer)]
            receives += [message for peer in world.others for message in part.receives(peer)]
        world.await_process_group()  # which may still form in the background after a change of the membership
        for transfer in world.start_transfers(sends, receives):
            transfer.wait()
        needed = [at for at, one in enumerate(self._sections) if world.rank in one.ranks]
        columns = [rows[at].sums() for at in needed]
        summands: list[tuple[Node, Values]] = []
        for rank, of_rank in enumerate(nodes):
            summands += [(node, [column[rank][at] for column in columns]) for at, node in enumerate(of_rank)]
        means = total(sorted(summands, key=lambda pair: first_of(pair[0])), add)
        divide_all([mean.values() for mean in means if mean is not None], divisor)
        self.means = dict(zip(needed, means, strict=True))
        for at, parameter in enumerate(tables):
            if self._in_sections:
                parameter.grad = parameter.detach().new_zeros(()).expand_as(parameter)  # commit clears unused ones
            else:
                parameter.grad = self.means[at]


class _Rows:
    """Rows of one section of a gradient, with their indices, of this rank, or of all ranks if this rank needs them.

    Args:
        tag: tag of the messages with indices. The next one is that of the messages with rows.
        table: the parameter.
        section: the section.
        counts: for each rank, the number of rows of each of its nodes.
        rank: this rank.
    """

    def __init__(self, tag: int, table: nn.Parameter, section: Section, counts: list[list[int]], rank: int) -> None:
        self._tag, self._counts, self._rank, self._ranks = tag, counts, rank, section.ranks
        self._shape = torch.Size([len(section.rows), *table.shape[1:]])
        narrow = torch.int32 if len(section.rows) < 1 << 31 else torch.int64
        here = range(len(counts)) if rank in section.ranks else [rank]
        of_rank = {one: sum(max(count, 0) for count in counts[one]) for one in here}
        self._indices = {one: torch.empty(count, dtype=narrow, device=table.device) for one, count in of_rank.items()}
        self._rows = {one: table.new_empty(count, *table.shape[1:]) for one, count in of_rank.items()}

    def fill(self, values: Values) -> None:
        """Put in the rows of this worker's nodes."""
        given = [value for value in values if value is not None]
        if given:
            self._indices[self._rank].copy_(torch.cat([value.indices()[0] for value in given]))
            self._rows[self._rank].copy_(torch.cat([value.values() for value in given]))

    def sends(self, peer: int) -> list[Message]:
        """Return the messages to a peer."""
        return self._messages(self._rank, peer) if peer in self._ranks else []

    def receives(self, peer: int) -> list[Message]:
        """Return the messages from a peer."""
        return self._messages(peer, peer) if self._rank in self._ranks else []

    def _messages(self, rank: int, peer: int) -> list[Message]:
        if not len(self._indices[rank]):
            return []
        return [Message(self._indices[rank], peer, self._tag), Message(self._rows[rank], peer, self._tag + 1)]

    def sums(self) -> list[Values]:
        """Return the sums over each node of each rank."""
        return [
            _cut(self._indices[rank].to(torch.int64), self._rows[rank], counts, self._shape)
            for rank, counts in enumerate(self._counts)
        ]


def _section(value: torch.Tensor | None, rows: range) -> torch.Tensor | None:
    """Return some rows of a coalesced gradient."""
    if value is None or len(rows) == value.shape[0]:
        return value
    indices = value.indices()[0]
    begin, end = torch.searchsorted(indices, indices.new_tensor([rows.start, rows.stop])).tolist()
    return _sparse(indices[begin:end] - rows.start, value.values()[begin:end], (len(rows), *value.shape[1:]))


def _sparse(indices: torch.Tensor, rows: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices.unsqueeze(0), rows, shape, is_coalesced=True, check_invariants=False)


def _cut(indices: torch.Tensor, rows: torch.Tensor, counts: list[int], shape: torch.Size) -> Values:
    """Cut the rows of one worker into the sparse tensors of its nodes, given the number of rows of each."""
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + max(count, 0))
    return [
        None if count == _NO_GRADIENT else _sparse(indices[begin:end], rows[begin:end], shape)
        for count, (begin, end) in zip(counts, pairwise(ends), strict=True)
    ]
