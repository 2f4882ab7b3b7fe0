"""Work stealing (rapid reassignment): a worker that has finished its share takes microbatches from the slowest worker.

::

    worker 0   ▓0 ▓1 ▓2 ▓7 ┐              8 microbatches on 3 workers: shares of 3, 3, 2
    worker 1   ▓3     ▓4   ┼ reduce ─     worker 1 is slow: 5 goes to worker 2; worker 0 has done its share
    worker 2   ▓6 ▓7 ▓5    ┘

After FlexRR (Harlap et al., SoCC 2016), which moves work to faster workers in a parameter server that tolerates some
lag. This strategy does so within a synchronous all-reduce step. The gradients of the same microbatches are summed in
the same way, whichever worker computes them, so no sample is lost, and with ``exact`` the bits are those of all-reduce.
A step takes as long as its microbatches take at the workers' combined speed, plus part of the slowest microbatch.

Leases decide which worker takes which microbatch (``comm.assignment.leases``), of located data only those that it has.
Between steps the shares follow the speeds (``schedule.speed_shares``), so that a persistently slow worker has less to
give away. Gradients are sent after
all computation, because until then no worker knows which results the others hold.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain

import torch

from paceline.comm.assignment.leases import Lease, leases_for
from paceline.comm.collectives.step_header import StepHeader
from paceline.data.feed import MicrobatchGroup
from paceline.schedule.placement import Pool, place, pools
from paceline.schedule.speed_shares import SpeedShares
from paceline.schedule.tree import Node, nodes_of
from paceline.settings import Settings
from paceline.step.commit import commit
from paceline.step.context import StepResult, TrainingContext
from paceline.step.gradients.accumulate import Accumulator, Values
from paceline.strategies.base import WHOLE_WIRES, Capabilities, Strategy
from paceline.strategies.data_parallel.reducer import Reducer
from paceline.strategies.data_parallel.results import Results


def capabilities(settings: Settings, workers: int) -> Capabilities:
    return Capabilities(
        fixed_point=True,
        wires=WHOLE_WIRES,
        phases=True,
        batch_losses=True,
        located=True,
        scales_loss=True,
        reads=("shares",),
    )


class WorkStealing(Strategy):
    """All-reduce in which early workers take microbatches from late workers."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        total = context.order.microbatches
        self.seconds: list[float] = [0.0] * context.world.size  # compute time of each worker in the last step
        self._reducer = Reducer(context, overlap=False)
        self._results = Results(context, total)
        self._leases = leases_for(context.world, total)
        self._steps = 0  # steps begun; a batch may have several
        self._pace = SpeedShares(context.world.size, total, fits=context.settings.shares == "speed")
        if total < 4 * context.world.size:
            context.warnings.append(
                f"{total} microbatches for {context.world.size} workers leave little to take over: set microbatches to "
                f"{4 * context.world.size} or more (it affects the bits)"
            )

    def groups(self, step: int) -> list[range]:
        """Return this worker's share if loader processes prefetch it. Otherwise microbatches are loaded when leased."""
        return self.encodes(step) if self._context.settings.workers_per_loader else []

    def encodes(self, step: int) -> list[range]:
        share = self._shares(step)[self._context.world.rank]
        return [range(microbatch, microbatch + 1) for microbatch in share]

    def _shares(self, step: int) -> Sequence[Sequence[int]]:
        order = self._context.order
        if (holders := order.holders_of(step)) is not None:
            return place(holders, self._context.world.size, self._speeds())
        return self._pace.shares(len(order.parts_of(step)))

    def _speeds(self) -> tuple[int, ...]:
        return self._pace.counts if all(self._pace.counts) else ()

    def _pools(self, step: int) -> list[Pool]:
        """Return the microbatches of each share by the workers that may take them."""
        size = self._context.world.size
        if (holders := self._context.order.holders_of(step)) is not None:
            return pools(holders, size, self._speeds())
        return [Pool(rank, share, range(size)) for rank, share in enumerate(self._shares(step)) if share]

    def step(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        context = self._context
        computed = ComputedGroups(context, step, groups)
        self._reducer.clear()
        self._results.audit(step, [[range(one, one + 1) for one in share] for share in self._shares(step)])
        context.compute.buffers.begin()
        context.update.check_structure()
        self._steps += 1
        self._leases.begin(self._steps, self._pools(step), self._pace.seconds())
        while (lease := self._leases.next()) is not None:
            if lease.share != context.world.rank or lease.again:
                seconds = time.monotonic() - self._leases.asked
                context.events.mark("steal", step=step, seconds=seconds, **lease._asdict())
            self._compute(step, lease, computed)
        return self._finish(step, computed)

    def _compute(self, step: int, lease: Lease, computed: ComputedGroups) -> None:
        """Compute a microbatch, unless another worker's result is available first."""
        context, begin = self._context, time.perf_counter()
        context.world.check()
        group = computed.group(lease.microbatch)
        forward = context.compute.forward_pass(group, step)
        if lease.again and self._leases.overtaken(lease.microbatch):
            return
        forward.total.backward()
        context.world.synchronize()  # a microbatch that is only queued says nothing about the speed
        gradients = self._reducer.take(step, lease.microbatch)
        if self._leases.finish(lease.microbatch):
            computed.add(group, forward.pair, gradients, [*forward.buffers], time.perf_counter() - begin)

    def _finish(self, step: int, computed: ComputedGroups) -> StepResult:
        context = self._context
        groups, pairs = computed.sorted()
        starts = [group.microbatches.start for group in groups]
        missing = [computed.missing[start] for start in starts]
        header = self._results.send(step, starts, pairs, computed.seconds, missing=any(map(len, missing)))
        if not context.settings.along_tree:  # one sum per worker, so the microbatches that it covers do not matter
            nothing: Values = [None] * len(context.update.parameters)
            one_each = [[Node(0, rank)] for rank in range(context.world.size)]
            self._reducer.send(one_each, computed.gradients.values() or [nothing], header.count)
        held = self._held(header, step)
        whole = [nodes_of(own) for own in held]
        running = [[Node(0, rank)] if own else [] for rank, own in enumerate(held)]
        if context.settings.along_tree:
            self._reducer.send(whole, computed.gradients.values(), header.count)
        while not self._reducer.finish(measure=True):
            self._reducer.again(step, groups, whole if context.settings.along_tree else running, header)
        layout = [[range(one, one + 1) for one in own] for own in held]
        note = self._results.send_missing(layout, missing) if header.missing else None
        parts = self._results.parts(layout, header, note)
        nodes = whole if context.settings.exact else running
        means = self._reducer.statistics(nodes, computed.statistics.values(), context.order.samples_of(step))
        self.seconds = header.seconds
        if self._pace.observe(header.seconds, [len(own) for own in held]):
            context.events.mark("shares", step=step, counts=self._pace.counts, seconds=self._pace.seconds())
        result = commit(context, step, groups, parts, means, header.notice, self._results.apply(header))
        self._reducer.accept()
        return result

    def close(self) -> None:
        self._reducer.close()

    def _held(self, header: StepHeader, step: int) -> list[list[int]]:
        """Return the microbatches whose results each rank holds."""
        header.check()
        numbers = sorted(chain.from_iterable(header.starts))
        assert numbers == list(range(len(self._context.order.parts_of(step)))), f"step {step} has results of {numbers}"
        return header.starts


class ComputedGroups:
    """Results that a worker has computed in a step."""

    def __init__(self, context: TrainingContext, step: int, groups: list[MicrobatchGroup]) -> None:
        self._context, self._step = context, step
        self._loaded = {group.microbatches.start: group for group in groups}
        self._results: dict[int, tuple[MicrobatchGroup, torch.Tensor]] = {}
        self.gradients = Accumulator(context.settings.along_tree)
        self.statistics = Accumulator(context.settings.exact)
        self.missing: dict[int, list[int]] = {}
        self.seconds = 0.0

    def group(self, microbatch: int) -> MicrobatchGroup:
        """Return the data of a microbatch, and load it first if necessary."""
        if microbatch not in self._loaded:
            (self._loaded[microbatch],) = self._context.feed.load(self._step, [range(microbatch, microbatch + 1)])
        return self._loaded[microbatch]

    def add(
        self, group: MicrobatchGroup, pair: torch.Tensor, gradients: Values, buffers: Values, seconds: float
    ) -> None:
        """Add a result that counts."""
        start = group.microbatches.start
        self._results[start] = group, pair
        self.missing[start] = [place for place, value in enumerate(gradients) if value is None]
        self.gradients.push(start, gradients)
        self.statistics.push(start, buffers)
        self.seconds += seconds

    def sorted(self) -> tuple[list[MicrobatchGroup], list[torch.Tensor]]:
        """Return the microbatch groups in order, with the sums and counts of their losses."""
        results = [self._results[start] for start in sorted(self._results)]
        return [group for group, _ in results], [pair for _, pair in results]
