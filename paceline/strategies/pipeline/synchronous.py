"""Synchronous pipelines: all microbatches of a batch go through, the pipeline runs empty, then one update.

The gradients of a microbatch are those of the model in one piece, and their sums go along the canonical tree, so the
bits do not depend on the cut, on the schedule, or on how many workers hold a stage.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from paceline.checkpoint.tensors import check_savable
from paceline.comm.all_gather import AllGather
from paceline.comm.step_header import HEADER_TAG, StepHeader, header_bytes
from paceline.data.feed import Piece
from paceline.data.keys import UPDATE, seed_of, seed_torch
from paceline.errors import InputError, WorkerLost
from paceline.schedule.choice import synchronous_schedule
from paceline.schedule.operations import Kind, Operation, Schedule
from paceline.schedule.tree import Node, nodes_of
from paceline.step.accumulate import ScatteredAccumulator, Values
from paceline.step.checks import Part, check_dense, mean_loss
from paceline.step.commit import skip
from paceline.step.job import Job, StepResult
from paceline.step.optimizer_probe import check_draws
from paceline.strategies.base import Strategy
from paceline.strategies.data_parallel.reducer import Reducer
from paceline.strategies.pipeline.executor import Hooks
from paceline.strategies.pipeline.rebalance import Rebalance
from paceline.strategies.pipeline.stages import Partition, Stages


class Synchronous(Strategy, Hooks):
    """A pipeline that runs empty in each step."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._plans: dict[int, Schedule] = {}
        self._updated = False
        self._parameters = job.update.parameters
        self._headers = AllGather(job.world, HEADER_TAG, header_bytes(job.order.microbatches))
        self._lay_out(None)

    def _lay_out(self, cut: Partition | None) -> None:
        """Borders the model, and get ready for what this worker holds of it then."""
        job = self._job
        enough = max(job.order.microbatches, job.world.size)  # for each worker to have some: who holds what
        self.staged = Stages(job, self._plan(enough), cut)
        self._executor = self.staged.executor(self)
        self._own = [name for names in self.staged.updated.values() for name in names]
        own = {name: self._parameters[name] for name in self._own}
        self._reducer = Reducer(job, own, self.staged.replicas, overlap=False)
        self._rebalance: Rebalance | None = None
        partition, one_each = self.staged.partition, len(self.staged.local) == 1
        if partition.times is not None and not partition.fixed and one_each:
            seconds = [forward + backward for forward, backward in partition.times]
            self._rebalance = Rebalance(seconds, partition.bounds, self.staged.workers_of)

    def _plan(self, microbatches: int) -> Schedule:
        if microbatches not in self._plans:
            self._plans[microbatches] = synchronous_schedule(
                self._job.settings.pipeline, self._job.world.size, microbatches
            )
        return self._plans[microbatches]

    def pieces(self, step: int) -> list[range]:
        return self.staged.pieces(self._plan(len(self._job.order.parts_of(step))))

    def step(self, step: int, pieces: list[Piece]) -> StepResult:
        job = self._job
        job.world.check()
        job.world.await_process_group()
        self.staged.prepare()
        if self.staged.requires_grad_flags.changed:
            self._executor.reset_links()
            self.staged.requires_grad_flags.save()
        self._run(step, pieces)
        exact = job.settings.exact
        pairs = self._executor.losses
        starts, missing = sorted(pairs), any(self._without.values())
        header = StepHeader(
            self._headers,
            step,
            starts,
            [pairs[start] for start in starts],
            job.world.device,
            self._executor.busy_seconds,
            missing,
        )
        self._executor.finish()
        self._add_tied()
        header.check()
        parts = self._parts(header)
        self._mean_gradients(header)
        statistics = self._mean_statistics(step)
        skipped = skip(job, step, parts, lambda bad: bad.microbatches, header.notice)
        if skipped is not None:
            self._heed(header.notice)
            return skipped
        loss, norm = mean_loss(parts, exact), self._norm()  # so all know that all have their mean gradients
        job.compute.buffers.accept(statistics)  # from here on the step is done: all have what the update needs
        seed_torch(seed_of(UPDATE, job.settings.seed, step))
        _, rate = job.update.apply(step, norm=norm)
        first, self._updated = not self._updated, True
        if first:
            check_savable(job.update.optimizer)
        self.staged.mark_updated()
        with contextlib.suppress(WorkerLost):  # the owner of a tied parameter has it; the next step finds the loss
            if first:
                check_draws(job)
            self.staged.tied.send_weights()
            self._watch(header.seconds)
            self._heed(header.notice)
        return StepResult(loss, norm, rate, notice=header.notice)

    def _run(self, step: int, pieces: list[Piece]) -> None:
        """Carry out the forward and backward passes."""
        job = self._job
        self._now = plan = self._plan(len(job.order.parts_of(step)))
        exact = job.settings.exact
        self._sums = {stage: ScatteredAccumulator(exact) for stage in self.staged.local}
        self._without: dict[int, Counter[str]] = {}  # in how many stages
        self._seen: dict[str, int] = {}
        job.compute.buffers.begin()
        job.update.check_frozen()
        for parameter in self._parameters.values():
            parameter.grad = None
        self._executor.reset()
        self._scale = 1.0 if exact else _scale_for(job.order.samples_of(step))
        self._executor.add(step, pieces, scale=self._scale)
        self._executor.run([one for one in plan.workers[job.world.rank] if one.kind not in (Kind.REDUCE, Kind.UPDATE)])

    def _heed(self, notice: int) -> None:
        """The world is to change, or the run to end: who leaves must not take the only copy of a stage along."""
        if notice:
            self.staged.synchronize()

    def _watch(self, seconds: list[float]) -> None:
        """Borders the model again if that would make the slowest stage faster."""
        decision = self._rebalance.add_step(seconds) if self._rebalance else None
        if decision is None:
            return
        self._job.events.mark("rebalance", **decision._asdict())
        self._job.warnings.append(decision.describe())
        self.staged.synchronize()
        before = self.staged.partition
        try:
            self._lay_out(replace(before, bounds=decision.bounds))
        except InputError:  # two stages would change one buffer
            self._lay_out(before)
            self._rebalance = None
        self._job.world.gather(None, "settling")  # nobody's next step begins before the cut is recorded

    def synchronize(self, steps: int) -> None:
        self.staged.synchronize()

    def close(self) -> frozenset[str] | None:
        self.staged.close()  # makes room for the parameters of other workers
        for parameter in self._parameters.values():
            parameter.grad = None
        return self.staged.holds

    def worker_of(self, stage: int, microbatch: int) -> int:
        return self._now.worker_of(stage, microbatch)

    def weights(self, operation: Operation) -> AbstractContextManager[object]:
        return self.staged.tied.during(operation)

    def on_gradients(self, stage: int, microbatch: int) -> None:
        """Take the gradients that a backward pass of a stage has left.

        Without exact bits those of parameters of one stage stay where they are: the next backward pass adds to them
        while they are at hand.
        """
        tied, held, exact = self.staged.tied, self.staged.local[stage], self._job.settings.exact
        values: dict[str, torch.Tensor | None] = {}
        check_dense(held.trained, [self._parameters[name].grad for name in held.trained])
        for name in held.trained:
            parameter, alone = self._parameters[name], tied.owner_of(name) is None
            gradient = parameter.grad
            if exact or not alone:
                parameter.grad = None
            elif gradient is not None:
                if self._seen.get(name) == gradient._version:  # nothing was added
                    gradient = None
                else:
                    self._seen[name] = gradient._version
            if gradient is None:
                self._without.setdefault(microbatch, Counter())[name] += 1
            values[name] = gradient if exact or not alone else None
        for name in held.trained:
            owner = tied.owner_of(name)
            if owner == stage:
                values[name] = tied.add_gradients(name, microbatch, values[name], self._now)
            elif owner is not None:
                tied.send_gradient(name, stage, microbatch, values[name], self._now)
        self._sums[stage].push(microbatch, [values[name] for name in self.staged.updated[stage]])

    def _add_tied(self) -> None:
        """Without exact bits: what other stages have of the parameters owned here."""
        for name, gradient in self.staged.tied.finish_step(self._now).items():
            stage = self.staged.tied.owner_of(name)
            assert stage is not None
            if gradient is not None:
                values: Values = [gradient if own == name else None for own in self.staged.updated[stage]]
                self._sums[stage].push(0, values)

    def _parts(self, header: StepHeader) -> list[Part]:
        without: dict[int, Counter[str]] = defaultdict(Counter)
        if header.missing:
            for told in self._job.world.gather(self._without, "step"):
                for microbatch, names in told.items():
                    without[microbatch].update(names)
        return [
            Part(range(start, start + 1), rank, loss, count, self._nowhere(without[start]))
            for start, rank, loss, count in header.losses()
        ]

    def _nowhere(self, without: Counter[str]) -> frozenset[int]:
        """The places of the parameters to which no stage gave a gradient."""
        users = self.staged.tied.users
        stages = [len(users[name]) if name in users else 1 for name in self._parameters]
        return frozenset(place for place, name in enumerate(self._parameters) if without[name] == stages[place])

    def _shares(self) -> list[list[Node]]:
        """The nodes of the canonical tree whose sums each worker of the team holds."""
        shares = []
        stage = min(self.staged.local)
        for place, rank in enumerate(self.staged.replicas.ranks):
            mine = [
                one.microbatch for one in self._now.workers[rank] if one.kind is Kind.FORWARD and one.stage == stage
            ]
            exact = nodes_of(mine) if self._job.settings.exact else [Node(0, place)] if mine else []
            shares.append(exact)
        return shares

    def _mean_gradients(self, header: StepHeader) -> None:
        if not self._job.settings.exact and self._shares()[self.staged.replicas.rank]:
            for stage, names in self.staged.updated.items():
                alone = {name: self._parameters[name].grad for name in names if self.staged.tied.owner_of(name) is None}
                self._sums[stage].push(0, [alone.get(name) for name in names])
        sums = _side_by_side(self._sums[stage].values() for stage in self.staged.local)
        self._reducer.send(self._shares(), sums, lambda: header.count() * self._scale)
        self._reducer.finish()

    def _mean_statistics(self, step: int) -> list[torch.Tensor]:
        """The means over all samples of the buffers that the forward passes of the stages held change."""
        buffers, exact = self._job.compute.buffers, self._job.settings.exact
        sums, names = [], []
        for stage, held in self.staged.local.items():
            names += buffers.names_in(held.buffers)
            one = ScatteredAccumulator(exact)
            for microbatch, values in self._executor.statistics[stage].items():
                one.push(microbatch, [*values.values()])
            sums.append(one.values())
        if not buffers.settled:
            told = self._job.world.gather(buffers.live, "step")
            buffers.settle({name for live in told for name in live})
            self.staged.check_buffers()
            buffers.restrict(names)
        if not buffers.live:
            return []
        places = [names.index(name) for name in buffers.live]
        kept: list[Values] = [[values[place] for place in places] for values in _side_by_side(sums)]
        return self._reducer.statistics(self._shares(), kept, self._job.order.samples_of(step))

    def _norm(self) -> torch.Tensor:
        """The global norm of the gradients of all stages."""
        return self._reducer.norm(set(self._own) if self.staged.replicas.rank == 0 else ())


def _scale_for(samples: int) -> float:
    """The power of two next to what gradients are mostly divided by: it changes no digit, and often is the divisor."""
    return 2.0 ** -round(math.log2(samples))


def _side_by_side(sums: Iterable[list[Values]]) -> list[Values]:
    """For each node the values of all stages, one after the other."""
    return [[value for values in nodes for value in values] for nodes in zip(*sums, strict=True)]
