"""Synchronous pipelines: all microbatches of a batch pass through, the pipeline drains, then the update is made.

GPipe (Huang et al. 2019, arXiv 1811.06965), 1F1B and interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473), zero
bubble (Qi et al. 2024, arXiv 2401.10241); drawn in ``schedule.pipeline.synchronous`` and the files beside it.

The gradients of a microbatch are those of the uncut model. With ``exact`` they are summed along the canonical tree, so
the bits depend neither on the cut, nor on the schedule, nor on the number of workers that hold a stage.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from paceline.checkpoint.tensors import check_savable
from paceline.comm.collectives.step_header import Headers, StepHeader
from paceline.comm.reduction.division import Divisor
from paceline.data.feed import MicrobatchGroup
from paceline.data.keys import UPDATE, seed_of, seed_torch
from paceline.errors import InputError, WorkerLost
from paceline.schedule.pipeline.choice import synchronous_schedule
from paceline.schedule.pipeline.first_pass import first_pass
from paceline.schedule.pipeline.operations import Kind, Operation, Schedule
from paceline.schedule.tree import Node
from paceline.step.checks import MicrobatchResult, check_dense
from paceline.step.commit import means, skip
from paceline.step.context import StepResult, TrainingContext
from paceline.step.gradients.accumulate import Accumulator, Values
from paceline.step.probes.optimizer_probe import check_draws
from paceline.strategies.base import LossPlace, Strategy
from paceline.strategies.data_parallel.norms import GlobalNorm
from paceline.strategies.data_parallel.reducer import Reducer
from paceline.strategies.data_parallel.results import metrics_of
from paceline.strategies.pipeline.executor import Executor, Hooks
from paceline.strategies.pipeline.rebalance import Rebalance
from paceline.strategies.pipeline.stages import Partition, Stages
from paceline.system.torch_internals import version_of


class Synchronous(Strategy):
    """Pipeline that drains in each step."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._schedules: dict[int, Schedule] = {}
        self._has_updated = False
        self._parameters = context.update.parameters
        self._headers = Headers(context.world, self._most_losses())
        self._cut(None)

    def _cut(self, partition: Partition | None) -> None:
        """Cut the model, and set up the objects that depend on the stages of this worker."""
        context = self._context
        enough = max(context.order.microbatches, context.world.size)  # so that each worker has operations
        self.stages = stages = Stages(context, self._schedule(enough), partition)
        self._executor = Executor(context, stages.local, stages.workers_of)
        self._updated = {name: self._parameters[name] for names in stages.updated.values() for name in names}
        self._reducer = Reducer(context, self._updated, stages.replicas, overlap=False)
        self._norm = GlobalNorm(context.world)
        self._rebalance: Rebalance | None = None
        if stages.partition.times is not None and not stages.partition.fixed and len(stages.local) == 1:
            seconds = [forward + backward for forward, backward in stages.partition.times]
            self._rebalance = Rebalance(seconds, stages.partition.bounds, stages.workers_of)

    def _schedule(self, microbatches: int) -> Schedule:
        if microbatches not in self._schedules:
            self._schedules[microbatches] = synchronous_schedule(
                self._context.settings.pipeline, self._context.world.size, microbatches
            )
        return self._schedules[microbatches]

    def _most_losses(self) -> int:
        """Return the largest number of losses of any worker in a step; the replicas of the last stage share them."""
        schedules = map(self._schedule, self._context.order.cuts())
        return max(
            Counter(one.worker_of(one.stages - 1, microbatch) for microbatch in range(one.microbatches)).most_common()[
                0
            ][1]
            for one in schedules
        )

    def groups(self, step: int) -> list[range]:
        return self.stages.groups(self._schedule(len(self._context.order.parts_of(step))))

    @property
    def loss_place(self) -> LossPlace:
        return LossPlace(self.stages.workers_of[-1], self.stages.outside)

    def encode(self, context: TrainingContext, step: int, groups: list[MicrobatchGroup]) -> None:
        self._prepare()
        schedule = first_pass(self._schedule(len(context.order.parts_of(step))))
        self._executor.reset()
        self._executor.add(step, groups, schedule.worker_of, audits=False)
        self._executor.run(schedule.workers[context.world.rank], Hooks(), keeps=False)

    def _prepare(self) -> None:
        """Prepare the stages for a step."""
        self._context.world.check()
        self._context.world.await_process_group()
        self.stages.prepare()
        if self.stages.requires_grad_flags.changed:
            self._executor.reset_links()
            self.stages.requires_grad_flags.save()

    def step(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        context, stages = self._context, self.stages
        self._prepare()
        schedule = self._schedule(len(context.order.parts_of(step)))
        scale = 1.0 if context.settings.exact else _scale_for(context.order.samples_of(step))
        gradients = self._compute(step, groups, schedule, scale)
        header = self._send_header(step, any(gradients.missing.values()))
        self._executor.finish()
        gradients.finish()
        header.check()
        parts = self._parts(header, gradients.missing)
        nodes = stages.nodes(schedule)
        self._mean_gradients(gradients, nodes, lambda: header.count() * scale)
        statistics = self._mean_statistics(step, nodes)
        skipped = skip(context, step, parts, lambda bad: bad.microbatches, header.notice)
        if skipped is not None:
            self._synchronize_on(header.notice)
            return skipped
        loss, metrics = means(context, parts)
        own = set(self._updated) if stages.replicas.rank == 0 else ()
        norm = self._norm.of_gradients(context.update.parameters, own)
        context.world.confirm(step)  # commit point: all workers have sent norms, so all have their means
        context.compute.buffers.accept(statistics)
        seed_torch(seed_of(UPDATE, context.settings.seed, step))
        _, rate = context.update.apply(step, norm=norm)
        first, self._has_updated = not self._has_updated, True
        if first:
            check_savable(context.update.optimizer)
        stages.mark_updated()
        with contextlib.suppress(WorkerLost):  # owners have the tied weights; the next step detects the loss
            if first:
                check_draws(context)
            stages.tied.send_weights()
            self._cut_again_if_slow(header.seconds)
            self._synchronize_on(header.notice)
        return StepResult(loss, norm, rate, notice=header.notice, metrics=metrics)

    def _compute(self, step: int, groups: list[MicrobatchGroup], schedule: Schedule, scale: float) -> StepGradients:
        """Run the forward and backward passes of a step."""
        context = self._context
        gradients = StepGradients(context, self.stages, schedule)
        context.compute.buffers.begin()
        context.update.check_structure()
        for parameter in self._parameters.values():
            parameter.grad = None
        self._executor.reset()
        self._executor.add(step, groups, schedule.worker_of, scale=scale)
        operations = schedule.workers[context.world.rank]
        self._executor.run([one for one in operations if one.kind not in (Kind.REDUCE, Kind.UPDATE)], gradients)
        return gradients

    def _send_header(self, step: int, missing: bool) -> StepHeader:
        pairs = self._executor.losses
        starts = sorted(pairs)
        seconds = self._executor.busy_seconds
        self._headers.own = self._context.compute.metrics
        return StepHeader(self._headers, step, starts, [pairs[start] for start in starts], seconds, missing)

    def _synchronize_on(self, notice: int) -> None:
        """Synchronize on a notice, because a worker that leaves may have the only copy of a stage."""
        if notice:
            self.stages.synchronize()

    def _cut_again_if_slow(self, seconds: list[float]) -> None:
        """Cut the model again if that makes the slowest stage faster."""
        decision = self._rebalance.add_step(seconds) if self._rebalance else None
        if decision is None:
            return
        self._context.events.mark("rebalance", **decision._asdict())
        self._context.warnings.append(decision.describe())
        self.stages.synchronize()
        before = self.stages.partition
        try:
            self._cut(replace(before, bounds=decision.bounds))
        except InputError:  # two stages would change one buffer
            self._cut(before)
            self._rebalance = None
        self._context.world.gather(None, "synchronizing")  # no step begins before the cut is recorded

    def synchronize(self, steps: int) -> None:
        self.stages.synchronize()

    @property
    def held(self) -> frozenset[str] | None:
        return self.stages.owned

    def close(self) -> frozenset[str] | None:
        self.stages.close()
        for parameter in self._parameters.values():
            parameter.grad = None
        return self.stages.owned

    def _parts(self, header: StepHeader, missing: dict[int, Counter[str]]) -> list[MicrobatchResult]:
        everywhere: dict[int, Counter[str]] = defaultdict(Counter)
        if header.missing:
            for one in self._context.world.gather(missing, "step"):
                for microbatch, names in one.items():
                    everywhere[microbatch].update(names)
        metrics = metrics_of(self._context, header)
        return [
            MicrobatchResult(
                range(start, start + 1),
                rank,
                loss,
                count,
                self._without_gradient(everywhere[start]),
                metrics=metrics.get(start, ()),
            )
            for start, rank, loss, count in header.losses()
        ]

    def _without_gradient(self, missing: Counter[str]) -> frozenset[int]:
        """Return the indices of the parameters that got no gradient in any stage."""
        users = self.stages.tied.users
        stages = [len(users[name]) if name in users else 1 for name in self._parameters]
        return frozenset(place for place, name in enumerate(self._parameters) if missing[name] == stages[place])

    def _mean_gradients(self, gradients: StepGradients, nodes: list[list[Node]], count: Callable[[], Divisor]) -> None:
        self._reducer.send(nodes, _concatenate(gradients.sums[stage].values() for stage in self.stages.local), count)
        self._reducer.finish()

    def _mean_statistics(self, step: int, nodes: list[list[Node]]) -> list[torch.Tensor]:
        """Return the means over all samples of the buffers that the forward passes of local stages change."""
        buffers = self._context.compute.buffers
        sums, names = [], []
        for stage, local in self.stages.local.items():
            names += buffers.names_in(local.buffers)
            accumulator = Accumulator(self._context.settings.exact)
            for microbatch, values in self._executor.statistics[stage].items():
                accumulator.push(microbatch, [*values.values()])
            sums.append(accumulator.values())
        if not buffers.fixed:
            self.stages.agree_on_buffers(buffers.live)
        if not buffers.live:
            return []
        places = [names.index(name) for name in buffers.live]
        changing: list[Values] = [[values[place] for place in places] for values in _concatenate(sums)]
        return self._reducer.statistics(nodes, changing, self._context.order.samples_of(step))


class StepGradients(Hooks):
    """Accumulated gradients of a step on one worker.

    Without ``exact``, gradients of parameters that only one stage uses stay in ``.grad`` until the end: the next
    backward pass adds to them while they are in the cache.
    """

    def __init__(self, context: TrainingContext, stages: Stages, schedule: Schedule) -> None:
        self._parameters = context.update.parameters
        self._exact = context.settings.exact
        self._stages, self._schedule = stages, schedule
        self._versions: dict[str, int] = {}
        """Tensor version of each ``.grad`` that stays, after the last microbatch."""
        # for each local stage, the sums of nodes of the canonical tree
        self.sums = {stage: Accumulator(self._exact) for stage in stages.local}
        # for each microbatch, the parameters without a gradient, and the number of stages without one
        self.missing: dict[int, Counter[str]] = {}

    def weights(self, operation: Operation) -> AbstractContextManager[object]:
        return self._stages.tied.during(operation)

    def on_gradients(self, stage: int, microbatch: int) -> None:
        tied, trained = self._stages.tied, self._stages.local[stage].trained
        values: dict[str, torch.Tensor | None] = {}
        check_dense(trained, [self._parameters[name].grad for name in trained])
        for name in trained:
            gradient, stays = self._parameters[name].grad, self._stays(name)
            if not stays:
                self._parameters[name].grad = None
            elif gradient is not None:
                if self._versions.get(name) == version_of(gradient):  # nothing was added
                    gradient = None
                else:
                    self._versions[name] = version_of(gradient)
            if gradient is None:
                self.missing.setdefault(microbatch, Counter())[name] += 1
            values[name] = None if stays else gradient
        for name in trained:
            owner = tied.owner_of(name)
            if owner == stage:
                values[name] = tied.add_gradients(name, microbatch, values[name], self._schedule)
            elif owner is not None:
                tied.send_gradient(name, stage, microbatch, values[name], self._schedule)
        self.sums[stage].push(microbatch, [values[name] for name in self._stages.updated[stage]])

    def finish(self) -> None:
        """Complete the sums after all backward passes: without ``exact``, add other stages' gradients and ``.grad``."""
        for name, gradient in self._stages.tied.finish_step(self._schedule).items():
            stage = self._stages.tied.owner_of(name)
            assert stage is not None
            if gradient is not None:
                self._push(stage, {name: gradient})
        if not self._exact and self._stages.nodes(self._schedule)[self._stages.replicas.rank]:
            for stage, names in self._stages.updated.items():
                self._push(stage, {name: self._parameters[name].grad for name in names if self._stays(name)})

    def _stays(self, name: str) -> bool:
        return not self._exact and self._stages.tied.owner_of(name) is None

    def _push(self, stage: int, values: dict[str, torch.Tensor | None]) -> None:
        self.sums[stage].push(0, [values.get(name) for name in self._stages.updated[stage]])


def _scale_for(samples: int) -> float:
    """Return the power of two nearest to 1 / samples. It causes no rounding, and often makes a division unnecessary."""
    return 2.0 ** -round(math.log2(samples))


def _concatenate(sums: Iterable[list[Values]]) -> list[Values]:
    """Return, for each node, the values of all stages in order."""
    return [[value for values in nodes for value in values] for nodes in zip(*sums, strict=True)]
