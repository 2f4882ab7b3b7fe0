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
        self._parameters, self._checked = dict(parameters), False
        self._counts = AllGather(context.world, ROWS_TAG, 8 * most * len(parameters), host=True)
        self.missing: list[list[int]] = []
        """For each microbatch of a step, the indices of the parameters to which it gave no gradient."""

    def begin(self, exact: Exact) -> None:
        """Start a step."""
        self._sums, self.missing = Accumulator(exact), []
        self.clear()
        if not self._checked:
            self._check_state()

    def _check_state(self) -> None:
        """Raise InputError if the optimizer keeps sparse tensors, which it makes in the first update."""
        self._checked = any(parameter in self._update.optimizer.state for parameter in self._parameters.values())
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
        rows = [
            _Rows(index, parameter, [[counts[index] for counts in of_rank] for of_rank in table])
            for index, parameter in enumerate(self._parameters.values())
        ]
        sends, receives = list[Message](), list[Message]()
        for index, one in enumerate(rows):
            one.fill(self._world.rank, [values[index] for values in own])
            sends += [message for peer in self._world.others for message in one.messages(self._world.rank, peer)]
            receives += [message for peer in self._world.others for message in one.messages(peer, peer)]
        for transfer in self._world.start_transfers(sends, receives):
            transfer.wait()
        columns = [one.sums() for one in rows]
        summands: list[tuple[Node, Values]] = []
        for rank, of_rank in enumerate(nodes):
            summands += [(node, [column[rank][at] for column in columns]) for at, node in enumerate(of_rank)]
        means = total(sorted(summands, key=lambda pair: first_of(pair[0])), add)
        divide_all([mean.values() for mean in means if mean is not None], divisor)
        for parameter, mean in zip(self._parameters.values(), means, strict=True):
            parameter.grad = mean


class _Rows:
    """Rows of one parameter's gradient on all ranks, with their indices.

    Args:
        index: number of the parameter.
        parameter: the parameter.
        counts: for each rank, the number of rows of each of its nodes.
    """

    def __init__(self, index: int, parameter: nn.Parameter, counts: list[list[int]]) -> None:
        self._tag, self._counts, self._shape = _TAGS + 2 * index, counts, parameter.shape
        narrow = torch.int32 if parameter.shape[0] < 1 << 31 else torch.int64
        of_rank = [sum(max(count, 0) for count in of_nodes) for of_nodes in counts]
        self._indices = [torch.empty(count, dtype=narrow, device=parameter.device) for count in of_rank]
        self._rows = [parameter.new_empty(count, *parameter.shape[1:]) for count in of_rank]

    def fill(self, rank: int, values: Values) -> None:
        """Put in the rows of this worker's nodes."""
        given = [value for value in values if value is not None]
        if given:
            self._indices[rank].copy_(torch.cat([value.indices()[0] for value in given]))
            self._rows[rank].copy_(torch.cat([value.values() for value in given]))

    def messages(self, rank: int, peer: int) -> list[Message]:
        """Return the messages that carry a rank's rows, for the exchange with a peer."""
        if not len(self._indices[rank]):
            return []
        return [Message(self._indices[rank], peer, self._tag), Message(self._rows[rank], peer, self._tag + 1)]

    def sums(self) -> list[Values]:
        """Return the sums over each node of each rank."""
        return [
            _cut(indices.to(torch.int64), rows, counts, self._shape)
            for indices, rows, counts in zip(self._indices, self._rows, self._counts, strict=True)
        ]


def _cut(indices: torch.Tensor, rows: torch.Tensor, counts: list[int], shape: torch.Size) -> Values:
    """Cut the rows of one worker into the sparse tensors of its nodes, given the number of rows of each."""
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
