"""Synchronous data parallel training: shares of the batch, one sum of gradients, the same update everywhere.

::

    worker 0   F0 B0 F1 B1 ┐
    worker 1   F2 B2       ┼ exchange ─ update          4 microbatches on 3 workers: shares of 2, 1, 1
    worker 2   F3 B3       ┘

The gradients leave in buckets while the backward pass of a worker's last microbatch computes the rest (Li et al. 2020,
arXiv 2006.15704). A worker adds the gradients of its own microbatches first: with ``exact`` along the canonical tree,
sending each whole node (``comm.reduction.bucketed``); without, into one running sum. All workers then hold the same
mean and make the same update.
"""

from __future__ import annotations

from itertools import chain
from time import perf_counter

import torch

from paceline.comm.all_gather import AllGather, PendingGather
from paceline.comm.reduction.bucketed import BucketedReduction
from paceline.comm.reduction.shared_memory import reduction_for
from paceline.comm.step_header import HEADER_TAG, MISSING_TAG, StepHeader, header_bytes
from paceline.data.feed import Piece
from paceline.schedule.shares import even
from paceline.schedule.tree import Node, whole_nodes
from paceline.step.accumulate import Accumulator, Values
from paceline.step.checks import Part
from paceline.step.commit import conclude
from paceline.step.fusion import Fusion
from paceline.step.job import Job, StepResult
from paceline.strategies.base import Strategy
from paceline.strategies.data_parallel.reducer import Reducer

_STATISTICS_TAGS = 1 << 28


class AllReduce(Strategy):
    """All workers compute a share of each batch and average their gradients.

    Args:
        job: what is trained.
        apart: never compute several microbatches in one pass.

    Attributes:
        seconds: how long each worker computed in the last step, as far as nobody had to wait for others.
    """

    def __init__(self, job: Job, apart: bool = False) -> None:
        self._job = job
        self.seconds: list[float] = [0.0] * job.world.size
        self._joining = Fusion(job, apart)
        self._parameters = list(job.update.parameters.values())
        self._reducer = Reducer(job, job.update.parameters, self._exchange_of(job))
        self._statistics: BucketedReduction | None = None
        most = self._most_pieces()
        self._headers = AllGather(job.world, HEADER_TAG, header_bytes(most))
        self._missing = AllGather(job.world, MISSING_TAG, (most + 1) * len(self._parameters))

    def _exchange_of(self, job: Job) -> BucketedReduction | None:
        """What brings the gradients together, the last parameter's first; none: the usual exchange."""
        return None

    def _most_pieces(self) -> int:
        """How many pieces a step has at most."""
        return self._job.order.microbatches

    def pieces(self, step: int) -> list[range]:
        return self._joining.pieces(self._shares(step)[self._job.world.rank])

    def _shares(self, step: int) -> tuple[range, ...]:
        return even(len(self._job.order.parts_of(step)), self._job.world.size)

    def _nodes(self, shares: tuple[range, ...]) -> list[list[Node]]:
        if self._job.settings.exact:
            return [whole_nodes(share) for share in shares]
        return [[Node(0, rank)] if share else [] for rank, share in enumerate(shares)]

    def step(self, step: int, pieces: list[Piece]) -> StepResult:
        job, exact = self._job, self._job.settings.exact
        shares = self._shares(step)
        layout = [self._joining.pieces(share) for share in shares]
        nodes = self._nodes(shares)
        statistics = Accumulator(exact)
        pairs: list[torch.Tensor] = []
        begin = perf_counter()
        self._reducer.begin(nodes, exact)
        job.compute.buffers.begin()
        job.update.check_frozen()
        for piece in pieces:
            job.world.check()
            computed = job.compute.forward_pass(piece, step)
            pairs.append(computed.pair)
            statistics.push(piece.microbatches.start, [*computed.buffers])
            if piece is pieces[-1]:
                header = self._send_header(step, layout, pairs, perf_counter() - begin)
                self._reducer.last(piece.microbatches.start, header)
            computed.total.backward()
            if piece is not pieces[-1]:
                self._reducer.push(piece.microbatches.start)
        if not pieces:
            header = self._send_header(step, layout, pairs, 0.0)
            self._reducer.nothing(header)
        without = self._reducer.written()
        header.check()  # the next tensor of a worker at another step may have another size
        missing = self._gather_missing(layout, without)
        self._reducer.finish()
        self.seconds = header.seconds
        parts = _put_together(layout, header, _without_gradient(layout, missing.wait()))
        self._joining.decide(pieces, torch.stack(pairs) if pairs else torch.zeros(0, 2))
        means = self._mean_statistics(step, nodes, [values for _, values in statistics.nodes()])
        return conclude(job, step, pieces, parts, means, header.notice)

    def close(self) -> None:
        self._reducer.close()
        for parameter in self._parameters:
            parameter.grad = None

    def _send_header(
        self, step: int, layout: list[list[range]], pairs: list[torch.Tensor], seconds: float
    ) -> StepHeader:
        starts = [piece.start for piece in layout[self._job.world.rank]]
        return StepHeader(self._headers, step, starts, pairs, self._job.world.device, seconds)

    def _parts(self, layout: list[list[range]], header: StepHeader, missing: list[list[int]]) -> list[Part]:
        """What all workers know of the pieces that each has computed, once the losses are known.

        Args:
            layout: the pieces of each rank.
            header: of all pieces; they say whether there is more to tell.
            missing: for each piece of this worker the places of the parameters to which it gave no gradient.
        """
        without = [frozenset[int]()] * sum(map(len, layout))
        if header.missing:
            without = _without_gradient(layout, self._gather_missing(layout, missing).wait())
        return _put_together(layout, header, without)

    def _gather_missing(self, layout: list[list[range]], missing: list[list[int]]) -> PendingGather:
        """Tell the others to which parameters this worker's pieces gave no gradient."""
        rows, device = max(map(len, layout)), self._job.world.device
        own = torch.zeros(rows, len(self._parameters), dtype=torch.uint8, device=device)
        for row, places in enumerate(missing):
            if places:
                own[row, places] = 1
        return self._missing.start(own)

    def _samples_of(self, step: int) -> int:
        """How many samples make the update."""
        return self._job.order.samples_of(step)

    def _mean_statistics(self, step: int, nodes: list[list[Node]], sums: list[Values]) -> list[torch.Tensor]:
        """The means over all samples of the batch of the buffers that the forward pass changes."""
        buffers = self._job.compute.buffers
        if not buffers.settled:
            places = buffers.settle(chain.from_iterable(self._job.world.gather(buffers.live, "step")))
            sums = [[values[place] for place in places] for values in sums]
        if not buffers.live:
            return []
        examples = buffers.examples()
        if self._statistics is None:
            self._statistics = reduction_for(self._job.world, examples, self._job.events, "buffers", _STATISTICS_TAGS)
        samples = self._samples_of(step)
        self._statistics.begin(nodes, lambda: samples)
        for member in range(len(examples)):
            for slot, values in zip(self._statistics.slots(member), sums, strict=True):
                value = values[member]
                assert value is not None
                slot.copy_(value)
            self._statistics.written(member)
        self._statistics.finish()
        return [self._statistics.mean(member) for member in range(len(examples))]


def _put_together(layout: list[list[range]], header: StepHeader, without: list[frozenset[int]]) -> list[Part]:
    owned = [(piece, rank) for rank, held in enumerate(layout) for piece in held]
    known = sorted(zip(owned, without, strict=True), key=lambda one: one[0][0].start)
    return [
        Part(piece, rank, loss, count, places)
        for ((piece, rank), places), (_, _, loss, count) in zip(known, header.losses(), strict=True)
    ]


def _without_gradient(layout: list[list[range]], tables: list[torch.Tensor]) -> list[frozenset[int]]:
    """For each piece of all workers the places of the parameters to which it gave no gradient."""
    if not any(table.any() for table in tables):
        return [frozenset()] * sum(map(len, layout))
    return [_places(row) for table, held in zip(tables, layout, strict=True) for row in table[: len(held)]]


def _places(flags: torch.Tensor) -> frozenset[int]:
    return frozenset(flags.nonzero().flatten().tolist())
