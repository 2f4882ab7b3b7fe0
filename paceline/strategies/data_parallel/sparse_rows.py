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

import torch
from torch import nn

from paceline.comm.collectives.all_gather import AllGather
from paceline.comm.collectives.step_header import ROWS_TAG
from paceline.comm.reduction.division import Divisor, divide_all
from paceline.comm.transport.base import Message
from paceline.errors import InputError
from paceline.schedule.tree import Node, first_of, total
from paceline.settings import Exact
from paceline.step.context import TrainingContext
from paceline.step.gradients.accumulate import Accumulator, Values, add

_TAGS = 1 << 26
_NO_GRADIENT = -1


class SparseRows:
    """Exchange of the sparse gradients of a step.

    Args:
        context: training context.
        parameters: parameters with sparse gradients.
        most: largest number of tree nodes of a worker in a step.
    """

    def __init__(self, context: TrainingContext, parameters: Mapping[str, nn.Parameter], most: int) -> None:
        self._world, self._update, self._most = context.world, context.update, most
        self._parameters = dict(parameters)
        self._counts = AllGather(context.world, ROWS_TAG, 8 * most * len(parameters), host=True)
        self.missing: list[list[int]] = []
        """For each microbatch of a step, the indices of the parameters to which it gave no gradient."""

    def begin(self, exact: Exact) -> None:
        """Start a step."""
        self._sums, self.missing = Accumulator(exact), []
        self.clear()
        for name, parameter in self._parameters.items():
            for key, value in self._update.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.is_sparse:
                    raise InputError(
                        f"{self._update.kind} keeps a sparse {key!r} for the parameter {name!r}, which cannot be saved "
                        f"or sent to workers that join. Use SGD without momentum, Adagrad or SparseAdam."
                    )

    def clear(self) -> None:
        """Release the gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def push(self, microbatch: int) -> None:
        """Take the gradients of a microbatch."""
        values: Values = []
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and not parameter.grad.is_sparse:
                raise InputError(
                    f"The parameter {name!r} of an embedding with sparse=True gets a dense gradient, as the forward "
                    f"pass also uses it elsewhere: use sparse=False."
                )
            values.append(None if parameter.grad is None else parameter.grad.coalesce())
        self.clear()
        self.missing.append([place for place, value in enumerate(values) if value is None])
        self._sums.push(microbatch, values)

    def finish(self, nodes: Sequence[Sequence[Node]], divisor: Divisor) -> None:
        """Exchange the rows, and put the means into ``.grad``. All workers call this.

        Args:
            nodes: for each rank, the nodes whose sums it sends.
            divisor: divisor of all sums.
        """
        own = [values for _, values in self._sums.nodes()]
        counts = torch.full((self._most, len(self._parameters)), _NO_GRADIENT, dtype=torch.int64)
        for row, values in enumerate(own):
            counts[row] = torch.tensor([_NO_GRADIENT if one is None else one.values().shape[0] for one in values])
        table = self._counts.start(counts).wait().tolist()
        columns = [
            self._gathered(
                place, parameter, [values[place] for values in own], [[row[place] for row in one] for one in table]
            )
            for place, parameter in enumerate(self._parameters.values())
        ]
        summands: list[tuple[Node, Values]] = []
        for rank, held in enumerate(nodes):
            summands += [(node, [column[rank][row] for column in columns]) for row, node in enumerate(held)]
        means = total(sorted(summands, key=lambda one: first_of(one[0])), add)
        divide_all([one.values() for one in means if one is not None], divisor)
        for parameter, mean in zip(self._parameters.values(), means, strict=True):
            parameter.grad = mean

    def _gathered(self, place: int, parameter: nn.Parameter, own: Values, counts: list[list[int]]) -> list[Values]:
        """Return the sums of one parameter's gradient over each node of each rank, given their numbers of rows."""
        world, whole = self._world, [sum(max(one, 0) for one in held) for held in counts]
        narrow = torch.int32 if parameter.shape[0] < 1 << 31 else torch.int64
        given = [one for one in own if one is not None]
        indices, rows = {}, {}
        for rank, count in enumerate(whole):
            indices[rank] = torch.empty(count, dtype=narrow, device=parameter.device)
            rows[rank] = torch.empty(count, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
        if given:
            indices[world.rank].copy_(torch.cat([one.indices()[0] for one in given]))
            torch.cat([one.values() for one in given], out=rows[world.rank])
        parts = (_TAGS + 2 * place, indices), (_TAGS + 2 * place + 1, rows)
        sends = [
            Message(part[world.rank], peer, tag) for peer in world.others for tag, part in parts if whole[world.rank]
        ]
        receives = [Message(part[peer], peer, tag) for peer in world.others for tag, part in parts if whole[peer]]
        for transfer in world.start_transfers(sends, receives):
            transfer.wait()
        return [
            _cut(indices[rank].to(torch.int64), rows[rank], held, parameter.shape) for rank, held in enumerate(counts)
        ]


def _cut(indices: torch.Tensor, rows: torch.Tensor, counts: list[int], shape: torch.Size) -> Values:
    """Return the sparse tensors of one worker's nodes, which have so many rows each."""
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + max(count, 0))
    return [
        None
        if count == _NO_GRADIENT
        else torch.sparse_coo_tensor(
            indices[begin:end].unsqueeze(0), rows[begin:end], shape, is_coalesced=True, check_invariants=False
        )
        for count, (begin, end) in zip(counts, pairwise(ends), strict=True)
    ]
