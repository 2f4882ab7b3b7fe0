"""Synchronous data parallel training: shares of the batch, one mean gradient, the same update everywhere.

::

    worker 0   F0 B0 F1 B1 ┐
    worker 1   F2 B2       ┼ reduce ─ update            4 microbatches on 3 workers: shares of 2, 1, 1
    worker 2   F3 B3       ┘

Gradients are sent in buckets while the backward pass of a worker's last microbatch computes the rest (Li et al. 2020,
arXiv 2006.15704). A worker first adds up the gradients of its own microbatches. With ``exact`` it does so along the
canonical tree, and sends each whole node (``comm.reduction.direct``); otherwise it has one running sum, and the backend
may add these sums in its own order (``comm.reduction.collective``). All workers then make the same update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from time import perf_counter
from typing import NamedTuple

import torch

from paceline.comm.collectives.step_header import StepHeader
from paceline.comm.reduction.executor import Reduction
from paceline.data.feed import MicrobatchGroup
from paceline.schedule.placement import place
from paceline.schedule.shares import even, runs
from paceline.schedule.tree import Node, nodes_of
from paceline.settings import Exact, Settings
from paceline.step.checks import MicrobatchResult
from paceline.step.commit import Apply, commit
from paceline.step.context import StepResult, TrainingContext
from paceline.step.divided.optimizer_state import DividedOptimizerState
from paceline.step.gradients.accumulate import Accumulator
from paceline.step.gradients.fusion import Fusion
from paceline.strategies.base import WHOLE_WIRES, Capabilities, Strategy, sparse_if_plain
from paceline.strategies.data_parallel.reducer import Reducer
from paceline.strategies.data_parallel.results import Results
from paceline.strategies.data_parallel.sparse_rows import Section, SparseRows
from paceline.system.wires import ADAPTIVE, PARTIAL_WIRES

_STEPS, _UNEVEN = 16, 1.25
"""Number of steps for which shares of located data are compared, and the ratio to even ones that is a warning."""


def capabilities(settings: Settings, workers: int) -> Capabilities:
    """Return the capabilities of all-reduce."""
    return Capabilities(
        exact=settings.fixed_point or settings.reduction != "collective",
        fixed_point=True,
        wires=(*WHOLE_WIRES, ADAPTIVE, *PARTIAL_WIRES),
        phases=True,
        batch_losses=True,
        located=True,
        closures=True,
        communication=True,
        sparse_gradients=sparse_if_plain(settings),
        scales_loss=True,
        even_shares=True,
        exact_with='reduction="tree"' + ' or exact="fixed-point"' * (settings.wire == "float32"),
        reads=("reduction", "bucket_megabytes"),
    )


class _Computed(NamedTuple):
    """Results of the microbatch groups of all workers, with this worker's buffer sums and the losses of its groups."""

    parts: list[MicrobatchResult]
    header: StepHeader
    statistics: Accumulator
    pairs: list[torch.Tensor]


class AllReduce(Strategy):
    """Strategy in which all workers compute a share of each batch and average their gradients.

    Args:
        context: training context.
        reducer: reducer of the gradients. Defaults to a reduction over all workers.
        shares: deterministic function from the number of microbatches to each rank's share. Defaults to even shares. Of
            located data, workers compute the microbatches that they have.
        apply: update function. Defaults to the same whole update on every worker.
        sections: see :class:`SparseRows`.

    Attributes:
        rows: exchange of sparse gradients. None if no embedding gives any.
        seconds: compute time of each worker in the last step, measured until workers begin to wait for each other.
    """

    def __init__(
        self,
        context: TrainingContext,
        reducer: Reducer | None = None,
        shares: Callable[[int], Sequence[range]] | None = None,
        apply: Apply | None = None,
        sections: Sequence[Section] | None = None,
    ) -> None:
        self._context, memory = context, context.world.host_memory
        self._mark = None if memory is None else memory.mark()
        self.seconds: list[float] = [0.0] * context.world.size
        self._fusion = Fusion(context)
        named = context.update.parameters
        sparse = {name: one for name, one in named.items() if name in context.sparse}
        dense = {name: one for name, one in named.items() if name not in sparse}
        self._reducer = reducer or Reducer(context, dense, any_order=not context.settings.along_tree)
        self._memory, self._notice = self._reducer.memory, 0
        in_lanes = None if self._memory is None else self._memory.share
        self.shares = shares or in_lanes or (lambda microbatches: even(microbatches, context.world.size))
        self._results = Results(context, self._largest_share(), apply)
        self.rows = SparseRows(context, sparse, self._largest_share(), sections) if sparse else None
        places = {name: place for place, name in enumerate(named)}
        self._dense, self._sparse = ([places[name] for name in names] for names in (dense, sparse))
        if context.order.located and not (context.order.incomplete or context.order.moves):
            self._tell_uneven()

    def groups(self, step: int) -> list[range]:
        return self._layout(step)[self._context.world.rank]

    def _largest_share(self) -> int:
        """Return the largest share of any worker in a step, including the short step at the end of an epoch."""
        if self._context.order.located:
            return self._context.order.microbatches
        return max(len(share) for count in self._context.order.cuts() for share in self.shares(count))

    def _layout(self, step: int) -> list[list[range]]:
        """Return the microbatch groups of each rank."""
        groups, shares = self._fusion.groups, self._shares(step)
        return [[group for run in runs(share) for group in groups(run, step)] for share in shares]

    def _shares(self, step: int) -> Sequence[Sequence[int]]:
        """Return the microbatches of each rank, in ascending order."""
        order = self._context.order
        if (holders := order.holders_of(step)) is not None:
            return place(holders, self._context.world.size)
        return self.shares(len(order.parts_of(step)))

    def _tell_uneven(self) -> None:
        """Warn if steps wait for a worker that has most of the data."""
        shares = [*map(self._shares, range(min(_STEPS, self._context.order.known)))]
        most = sum(max(map(len, one)) for one in shares)
        longer = most / sum(-(-sum(map(len, one)) // len(one)) for one in shares)
        if longer > _UNEVEN:
            counts = [sum(map(len, own)) for own in zip(*shares, strict=True)]
            self._context.warnings.append(
                f"steps take {longer:.1f} times as long as with even shares, because the others wait for rank "
                f"{counts.index(max(counts))}, which alone has much of the data: copy its shards to another machine"
            )

    def _nodes(self, shares: Sequence[Sequence[int]], along_tree: Exact) -> list[list[Node]]:
        """Return the nodes that each rank sends: nodes of the canonical tree, or one node for its running sum."""
        if along_tree:
            return [nodes_of(share) for share in shares]
        return [[Node(0, rank)] if share else [] for rank, share in enumerate(shares)]

    def step(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        context, layout = self._context, self._layout(step)
        shares = self._shares(step)
        groups = self._results.audit(step, layout, groups)
        context.compute.buffers.begin()
        context.update.check_structure()
        computed = self._gradients(step, groups, shares)
        header = computed.header
        self.seconds = header.seconds
        self._fusion.decide(step, groups, torch.stack(computed.pairs) if computed.pairs else torch.zeros(0, 2))
        sums = [values for _, values in computed.statistics.nodes()]
        means = self._reducer.statistics(
            self._nodes(shares, context.settings.exact), sums, context.order.samples_of(step)
        )
        apply = self._results.apply(header)
        result = commit(
            *(context, step, groups, computed.parts, means, header.notice, apply),
            again=lambda: self._gradients(step, groups, shares, again=True).parts,
        )
        self._reducer.accept(result.applied)
        self._notice = result.notice
        return result

    def _gradients(
        self, step: int, groups: list[MicrobatchGroup], shares: Sequence[Sequence[int]], again: bool = False
    ) -> _Computed:
        """Compute the mean gradients into ``.grad``; ``again`` marks a repetition within the step."""
        context, reducer = self._context, self._reducer
        nodes = self._nodes(shares, context.settings.along_tree)
        statistics, pairs = Accumulator(context.settings.exact), list[torch.Tensor]()
        starts = [group.microbatches.start for group in groups]
        begin = perf_counter()
        reducer.begin(nodes, context.settings.along_tree, step)
        if self.rows is not None:
            self.rows.begin(context.settings.along_tree)
        for group in groups:
            context.world.check()
            computed = self._fusion.forward(group, step)
            pairs.append(computed.pair)
            statistics.push(group.microbatches.start, [*computed.buffers])
            if group is groups[-1]:
                header = self._results.send(step, starts, pairs, perf_counter() - begin, again=again)
                reducer.last(group.microbatches.start, header)
            computed.total.backward()
            if group is not groups[-1]:
                reducer.push(group.microbatches.start)
            if self.rows is not None:
                self.rows.push(group.microbatches.start)
        if not groups:
            header = self._results.send(step, starts, pairs, again=again)
            reducer.nothing(header)
        without = reducer.written()
        header.check()  # a worker at another step may send tensors of other sizes
        layout = [_groups_of(share, own) for share, own in zip(shares, header.starts, strict=True)]
        missing = self._results.send_missing(layout, self._all_missing(without))
        while not reducer.finish(measure=self._results.whole_update):
            reducer.again(step, groups, nodes, header)
        if self.rows is not None:
            self.rows.finish(nodes, header.count() * context.compute.scale)
        return _Computed(self._results.parts(layout, header, missing), header, statistics, pairs)

    def _all_missing(self, dense: list[list[int]]) -> list[list[int]]:
        """Return the indices of all parameters to which each microbatch gave no gradient, from those of the reducer."""
        if self.rows is None:
            return dense
        return [
            [*(self._dense[place] for place in one), *(self._sparse[place] for place in other)]
            for one, other in zip(dense, self.rows.missing, strict=True)
        ]

    @property
    def reduction(self) -> Reduction:
        assert self._reducer.reduction is not None
        return self._reducer.reduction

    def exchange_alone(self, step: int) -> float:
        """Exchange gradients as in a step, with nothing else to do, and return the seconds. All workers call this."""
        shares, reduction = self._shares(step), self.reduction
        self._context.world.gather(None, "step")
        begin = perf_counter()
        reduction.begin(self._nodes(shares, self._context.settings.along_tree), 1.0)
        reduction.written(*range(reduction.members))
        reduction.finish()
        return perf_counter() - begin

    @property
    def divided(self) -> DividedOptimizerState | None:
        return None if self._memory is None else self._memory.divided

    def point(self, steps: int) -> Mapping[str, torch.Tensor] | None:
        return None if self._memory is None else self._memory.point(steps, self._notice)

    def renew(self, context: TrainingContext) -> Strategy:
        self.close()
        if context.world.host_memory is not None and self._mark is not None:
            context.world.host_memory.rewind(self._mark)
        return AllReduce(context)

    def close(self) -> frozenset[str] | None:
        self._reducer.close()
        return None if self._memory is None else self._memory.leave()


def _groups_of(share: Sequence[int], starts: Sequence[int]) -> list[range]:
    """Return the groups of a share that begin at these microbatches."""
    return [group for run in runs(share) for group in _cut(run, [one for one in starts if one in run])]


def _cut(run: range, starts: Sequence[int]) -> list[range]:
    return [range(start, stop) for start, stop in pairwise([*starts, run.stop])]
