"""Synchronous training with backup workers: a step does not wait for the slowest workers.

::

    worker 0   ▓0 ▓1 ──── ┐                     2 workers are needed, 1 is a backup worker
    worker 1   ▓2 ░3 ── ✗ ┼ reduce ─ update     worker 1 is late: it sends nothing; 2 and 3 come back in the next step
    worker 2   ▓4 ▓5 ──── ┘

After Chen et al. 2016 (arXiv 1604.00981): the first N of N + b gradients make the update, and the others are dropped.
This implementation has no server. Before any gradient is sent, the workers agree on one set of N contributions
(``comm.assignment.quorum``), so all tensors are summed over the same workers. Then all workers reduce. A late worker
stops between two passes, and only adds up its chunk of the others' gradients. The sum is divided by the samples used.

The paper loses the samples of a dropped gradient. This strategy returns them to the epoch (``schedule.backup``): a step
computes b groups more than its update needs, taken from the next batches, and the last step of an epoch uses all
remaining ones.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import nn

from paceline.comm.assignment.quorum import quorum_for
from paceline.data.feed import MicrobatchGroup
from paceline.data.order import BatchOrder, Order
from paceline.errors import ConfigError
from paceline.schedule.backup import BackupShares, EpochLength, EpochProgress, resume_epoch, step_shares
from paceline.schedule.tree import Node
from paceline.settings import Settings
from paceline.step.checks import MicrobatchResult
from paceline.step.commit import Apply, commit
from paceline.step.context import StepResult, TrainingContext
from paceline.step.gradients.accumulate import Values, add
from paceline.strategies.base import Capabilities, Strategy, check_shares
from paceline.strategies.data_parallel import allreduce
from paceline.strategies.data_parallel.allreduce import AllReduce
from paceline.strategies.data_parallel.reducer import Reducer
from paceline.strategies.data_parallel.results import Results
from paceline.strategies.single import Single

_STATE = "backup"
_FEW = 4  # warn if a step has fewer microbatches than this for each worker that it waits for
_PATIENCE = 1.5
"""A finished worker computes a copy of another group after this multiple of the time that its own group took."""


def capabilities(settings: Settings, workers: int) -> Capabilities:
    """Return the capabilities. Without backup workers they are those of all-reduce, which is then built."""
    if settings.backup.workers == 0:
        plain = allreduce.capabilities(settings, workers)
        return replace(plain, reads=("backup", *plain.reads))
    return Capabilities(exact=False, exact_with="backup.workers = 0", carries=False, audits=False, reads=("backup",))


def validate(settings: Settings, model: nn.Module, order: BatchOrder, workers: int, largest: int) -> None:
    """Raise if the run cannot spare the configured number of backup workers."""
    check_shares(settings, order, workers, largest)
    wanted = _spare(settings)
    if wanted and not isinstance(order, Order):
        raise ConfigError(
            f"backup.workers = {wanted} needs epochs of one length that is known beforehand, because late microbatches "
            f"are computed at the end of their epoch: use a data set of fixed length, or backup.workers = 0."
        )
    if wanted and order.cut is not None:
        raise ConfigError(
            f"backup.workers = {wanted} needs the same number of microbatches in each batch, and microbatch_order may "
            f"give fewer: leave out microbatch_order, or set backup.workers = 0."
        )
    if workers > 1 and wanted >= workers:
        raise ConfigError(
            f"backup.workers = {wanted} leaves none of the {workers} workers to wait for: use fewer than "
            f"{workers} backup workers, or more than {wanted} workers."
        )


def build(context: TrainingContext) -> Strategy:
    return AllReduce(context) if context.settings.backup.workers == 0 else BackupWorkers(context)


def build_alone(context: TrainingContext) -> Strategy:
    """Build the strategy of a single worker, which still has to compute late microbatches of the epoch."""
    return Single(context) if context.settings.backup.workers == 0 else BackupWorkers(context)


class BackupWorkers(Strategy):
    """All-reduce over the workers that finish first.

    Args:
        context: training context.
        reducer: reducer of the gradients. Defaults to a reduction over all workers.
        apply: update function. Defaults to the same whole update on every worker.
    """

    def __init__(self, context: TrainingContext, reducer: Reducer | None = None, apply: Apply | None = None) -> None:
        self._context = context
        self._reducer = reducer or Reducer(context, overlap=False)
        most = 2 * context.order.microbatches  # the last step of an epoch adds less than one batch
        self._results = Results(context, most, apply)
        size, order = context.world.size, context.order
        assert isinstance(order, Order)
        wanted = _spare(context.settings)
        self._spare = min(wanted, size - 1)
        if size > 1 and self._spare < wanted:
            context.warnings.append(
                f"{size} workers are left, of which at most {size - 1} can be backup workers: {self._spare} instead of "
                f"backup.workers = {wanted}"
            )
        waited = size - self._spare
        if self._spare and order.microbatches < _FEW * waited:
            context.warnings.append(
                f"{order.microbatches} microbatches for {waited} workers that are waited for: a late worker holds up "
                f"the others by a part of one of its microbatches; set microbatches to {_FEW * waited} or more"
            )
        last = len(order.parts_of(order.steps_per_epoch - 1))
        total = (order.steps_per_epoch - 1) * order.microbatches + last
        self._length = EpochLength(order.steps_per_epoch, order.microbatches, total)
        self._quorum = quorum_for(context.world)

    def groups(self, step: int) -> list[range]:
        """Return no groups: the microbatches of a step depend on which workers were late in the previous step."""
        return []

    def step(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        context = self._context
        progress = self._progress(step)
        shares = step_shares(progress, self._length, context.world.size, self._spare)
        self._reducer.clear()
        context.compute.buffers.begin()
        context.update.check_structure()
        self._quorum.begin(step, len(shares.members), shares.needed)
        counted = self._compute(step, shares)
        agreed = self._quorum.agreed()
        result = self._finish(step, shares, agreed, counted)
        used = [one for group in agreed for one in shares.members[group]]
        context.strategy_state[_STATE] = {"epoch": context.order.epoch_of(step), **asdict(progress.after(used))}
        self._record(step, shares, agreed)
        return result

    def close(self) -> None:
        self._reducer.close()

    def _progress(self, step: int) -> EpochProgress:
        epoch, place = divmod(step, self._length.steps)
        if (state := self._context.strategy_state.get(_STATE)) is None:
            return resume_epoch(place, self._length)
        progress = EpochProgress()
        if state["epoch"] == epoch:
            progress = EpochProgress(state["steps"], state["before"], tuple(state["beyond"]))
        while progress.steps < place:  # the script skipped steps
            progress = progress.skipped(self._length)
        return progress

    def _origin(self, step: int, microbatch: int) -> tuple[int, int]:
        """Return the step of a microbatch of the epoch, and its index in the batch of that step."""
        place, number = divmod(microbatch, self._length.batch)
        return step - step % self._length.steps + place, number

    def _compute(self, step: int, shares: BackupShares) -> Counted:
        """Compute this worker's group, and copies of other groups if that may help, until enough groups are done."""
        quorum, world = self._quorum, self._context.world
        counted = Counted()
        group = shares.of(world.rank, step, world.size)
        while group is not None:
            begin = time.monotonic()
            quorum.start(group)
            result = self._computed(step, shares.members[group], group)
            if result is not None and quorum.finish(group):
                counted.add(group, result)
            now = time.monotonic()
            if not shares.copied or quorum.wait(now + (_PATIENCE - 1.0) * (now - begin)):
                break
            group = quorum.open_group()
        quorum.wait()
        return counted

    def _computed(self, step: int, members: tuple[int, ...], group: int) -> Result | None:
        """Compute a group. Returns None if its result would be too late to count."""
        context, result = self._context, Result()
        for microbatch in members:
            context.world.check()
            if self._quorum.is_late(group):
                return None
            origin, number = self._origin(step, microbatch)
            (loaded,) = context.feed.load(origin, [range(number, number + 1)])
            computed = context.compute.forward_pass(loaded, origin)
            if self._quorum.is_late(group):
                return None
            computed.total.backward()
            context.world.synchronize()  # work that is only queued does not count as done
            result.add(loaded.samples, computed.pair, self._reducer.take(origin, number), [*computed.buffers])
        return result

    def _finish(self, step: int, shares: BackupShares, agreed: dict[int, int], counted: Counted) -> StepResult:
        """Reduce the results that count, and update the model."""
        context, size = self._context, self._context.world.size
        places = _places(shares)
        held = [[place for group in agreed if agreed[group] == rank for place in places[group]] for rank in range(size)]
        layout = [[range(place, place + 1) for place in own] for own in held]
        nodes = [[Node(0, rank)] if own else [] for rank, own in enumerate(held)]
        pairs = [pair for group in sorted(counted.results) for pair in counted.results[group].pairs]
        header = self._results.send(step, held[context.world.rank], pairs)
        self._reducer.send(nodes, counted.gradients(), header.count)
        self._reducer.finish()
        missing = [one for group in sorted(counted.results) for one in counted.results[group].missing]
        note = self._results.send_missing(layout, missing) if header.missing else None
        parts = [self._named(step, shares, part) for part in self._results.parts(layout, header, note)]
        used = [self._origin(step, one) for group in agreed for one in shares.members[group]]
        samples = sum(len(context.order.parts_of(origin)[number]) for origin, number in used)
        means = self._reducer.statistics(nodes, counted.statistics(), samples)
        return commit(context, step, [], parts, means, header.notice, self._results.apply(header))

    def _named(self, step: int, shares: BackupShares, part: MicrobatchResult) -> MicrobatchResult:
        """Renumber a result from its index in the step to the index of its microbatch in the batch it belongs to."""
        members = [one for group in shares.members for one in group]
        origin, number = self._origin(step, members[part.microbatches.start])
        return part._replace(microbatches=range(number, number + 1), origin=None if origin == step else origin)

    def _record(self, step: int, shares: BackupShares, agreed: dict[int, int]) -> None:
        """Record the agreed set: rank and microbatches of each contribution, and the dropped groups."""
        origins = [[self._origin(step, one) for one in group] for group in shares.members]
        self._context.events.mark(
            "backup",
            step=step,
            used=[(rank, origins[group]) for group, rank in agreed.items()],
            dropped=[one for group, one in enumerate(origins) if group not in agreed],
        )


@dataclass
class Result:
    """Result of a group: sums over its microbatches, and the loss and the missing gradients of each microbatch."""

    gradients: Values = field(default_factory=list)
    statistics: Values = field(default_factory=list)
    pairs: list[torch.Tensor] = field(default_factory=list)
    missing: list[list[int]] = field(default_factory=list)
    samples: int = 0

    def add(self, samples: int, pair: torch.Tensor, gradients: Values, statistics: Values) -> None:
        self.samples += samples
        self.pairs.append(pair)
        self.missing.append([place for place, value in enumerate(gradients) if value is None])
        self.gradients = add(self.gradients, gradients) if self.gradients else gradients
        self.statistics = add(self.statistics, statistics) if self.statistics else statistics


@dataclass
class Counted:
    """Results of this worker that count, by group."""

    results: dict[int, Result] = field(default_factory=dict)

    def add(self, group: int, result: Result) -> None:
        self.results[group] = result

    def gradients(self) -> list[Values]:
        return _sum([result.gradients for result in self.results.values()])

    def statistics(self) -> list[Values]:
        """Return a list with the sum of the changed buffers, empty without results."""
        return _sum([result.statistics for result in self.results.values()])


def _sum(results: list[Values]) -> list[Values]:
    if not results:
        return []
    total = results[0]
    for other in results[1:]:
        total = add(total, other)
    return [total]


def _places(shares: BackupShares) -> list[list[int]]:
    """Return the indices of the microbatches of each group among all microbatches of the step."""
    places, start = [], 0
    for group in shares.members:
        places.append(list(range(start, start + len(group))))
        start += len(group)
    return places


def _spare(settings: Settings) -> int:
    return 1 if settings.backup.workers is None else settings.backup.workers
