"""Asynchronous pipelines: PipeDream and PipeDream-2BW.

Harlap et al. 2018, arXiv 1806.03377; Narayanan et al. 2021, arXiv 2006.09503. Microbatches flow through from step to
step. Each stage updates its weights while other microbatches are in flight, and a backward pass uses the weight version
of its forward pass, as drawn in :mod:`paceline.schedule.pipeline.pipedream`. So the result differs from that of one
process: the earlier the stage, the staler its gradients.

A stage gets the loss of a microbatch with its gradient. The global gradient norm combines the stage's own update with
the latest norms received from the other stages. The pipeline drains before an evaluation or a checkpoint, at the end,
after every ``pipeline.flush_every`` steps, and after a batch that the replicas of a stage share unequally.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from paceline.checkpoint.tensors import check_savable
from paceline.comm.reduction.direct import DirectExchange
from paceline.comm.reduction.executor import Reduction
from paceline.data.feed import MicrobatchGroup
from paceline.data.keys import UPDATE, seed_of, seed_torch
from paceline.errors import InputError
from paceline.schedule.pipeline.choice import async_pipeline_for
from paceline.schedule.pipeline.operations import Kind, Operation, Schedule
from paceline.schedule.pipeline.pipedream import AsyncPipeline, drain, window
from paceline.schedule.tree import Node
from paceline.step.checks import MicrobatchResult, check_dense, non_finite
from paceline.step.context import StepResult, TrainingContext
from paceline.step.gradients.accumulate import Accumulator, Values
from paceline.strategies.base import Strategy
from paceline.strategies.pipeline.executor import Executor, Hooks
from paceline.strategies.pipeline.stages import Stages
from paceline.strategies.pipeline.tied_pipedream import TiedPipeDream
from paceline.strategies.pipeline.weight_stash import WeightStash

_STATE = "pipeline"
_TAGS = 1 << 12
_NOTICE_STEPS = 20  # number of steps between two exchanges of membership notices


class PipeDream(Strategy):
    """Asynchronous pipeline, which drains only when it must."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        context.warnings.append(
            f"schedule {context.settings.pipeline.schedule!r} uses older weights for microbatches in flight: the bits "
            f"are not those of one process, and the loss reported is that of the microbatches that have come back"
        )
        self._stream = async_pipeline_for(context.settings.pipeline, context.world.size, context.order.microbatches)
        self.stages = Stages(context, window(self._stream, 0, 2 * sum(self._stream.replicas)))
        self._executor = Executor(context, self.stages.local, self.stages.workers_of)
        self._updates = _StageUpdates(context, self.stages, self._stream, self._executor)
        self._round = math.lcm(*self._stream.replicas)
        self._entered = 0
        """Number of microbatches since the pipeline was last empty."""
        self._buffers_agreed = False

    def groups(self, step: int) -> list[range]:
        (stage,) = self.stages.local
        if stage not in (0, self.stages.count - 1):
            return []
        numbers = range(len(self._context.order.parts_of(step)))
        rank = self._context.world.rank
        return [range(number, number + 1) for number in numbers if self._stream.worker(stage, number) == rank]

    def step(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        context, training, grads = self._context, self.stages.training_flags, self.stages.requires_grad_flags
        context.world.check()
        context.world.await_process_group()
        if training.changed or grads.changed:
            self._drain()
        self.stages.prepare()
        training.save()
        if grads.changed:
            self._executor.reset_links()
            grads.save()
        begin = self._entered
        if begin == 0:
            context.compute.buffers.begin()
        context.update.check_structure()
        self._updates.forget_done()
        self._entered += len(context.order.parts_of(step))
        self.stages.mark_updated()
        self._executor.add(step, groups, self._stream.worker, begin)
        self._run(window(self._stream, begin, self._entered))
        # The next batch must begin with replica 0. Drain now: a replica without a microbatch may already wait for the
        # others at the next barrier.
        if self._entered % self._round:
            self._drain()
        result = self._updates.result()
        every = context.settings.pipeline.flush_every
        flushes = every is not None and (step + 1) % every == 0
        if not flushes and (step + 1) % _NOTICE_STEPS:
            return result
        notice = max(context.world.gather(context.world.notice(), "step"))
        if flushes:
            self._drain()
        if notice:  # a worker that leaves may have the only copy of a stage
            self.synchronize(step + 1)
        return replace(result, notice=notice)

    def synchronize(self, steps: int) -> None:
        self._drain()
        self.stages.synchronize()

    def close(self) -> frozenset[str] | None:
        self.stages.close()
        self._updates.clear_gradients()
        return self.stages.owned

    def _run(self, schedule: Schedule) -> None:
        operations = schedule.workers[self._context.world.rank]
        self._executor.run([one for one in operations if one.kind is not Kind.REDUCE], self._updates)

    def _drain(self) -> None:
        """Finish the microbatches in flight, with the flags they began with, and restart their numbers at 0."""
        if not self._entered:
            return
        training, grads = self.stages.training_flags, self.stages.requires_grad_flags
        with training.set_to(training.saved), grads.set_to(grads.saved):
            self._run(drain(self._stream, self._entered))
        self._executor.finish()
        self._updates.finish()
        self._executor.reset()
        if not self._buffers_agreed:
            self.stages.agree_on_buffers(self._context.compute.buffers.agreed)
            self._buffers_agreed = True
        self._entered = 0


class _StageUpdates(Hooks):
    """Accumulated gradients of this worker's stage, and its updates."""

    def __init__(self, context: TrainingContext, stages: Stages, stream: AsyncPipeline, executor: Executor) -> None:
        ((self._stage, local),) = stages.local.items()
        self._context = context
        self._replicas = stages.replicas
        self._stream, self._executor = stream, executor
        self._names, self._buffers = local.trained, local.buffers
        self._parameters = [context.update.parameters[name] for name in self._names]
        self._stash = WeightStash(self._parameters)
        self._tied = TiedPipeDream(context, self._stage, stages.tied, stream)
        self._reduction: Reduction | None = None
        self._count = int(context.strategy_state.get(_STATE, {}).get("updates", 0))
        self._done: list[int] = []
        self._next = 0
        """Next microbatch whose gradients this worker will get."""
        self._losses: list[list[float]] = []
        self._result = StepResult(math.nan, torch.tensor(math.nan), context.update.learning_rate)
        self._squares = 0.0
        self._heard = {True: 0.0, False: 0.0}
        """Sums of the squared gradients of the previous stages (forward) and of the following stages."""
        self._reset_sums()

    def _reset_sums(self) -> None:
        self._sums, self._statistics = Accumulator(False), Accumulator(False)
        self._versions: list[int] = []
        self._origin: tuple[int, int] | None = None
        self._samples = 0
        self._totals = torch.zeros(2, dtype=torch.float64)

    def attach(self, microbatch: int, forward: bool) -> torch.Tensor:
        squares = torch.tensor([self._squares + self._heard[forward]], dtype=torch.float64)
        attachment = squares if forward else torch.cat((self._executor.losses[microbatch].cpu(), squares))
        return attachment.to(self._context.world.device)

    def on_attachment(self, microbatch: int, forward: bool, attachment: torch.Tensor) -> None:
        self._heard[forward] = float(attachment[-1])
        if not forward:
            self._executor.losses[microbatch] = attachment[:-1]

    def weights(self, operation: Operation) -> AbstractContextManager[object]:
        return self._stash.use(operation.version)

    def on_gradients(self, stage: int, microbatch: int) -> None:
        values: Values = [parameter.grad for parameter in self._parameters]
        self.clear_gradients()
        check_dense(self._names, values)
        loss = self._executor.losses[microbatch]
        self._sums.push(microbatch, values)
        changed = self._executor.statistics[stage][microbatch]
        names = self._context.compute.buffers.names_in(self._buffers)  # may be fewer than when the forward pass ran
        self._statistics.push(microbatch, [changed[name] for name in names])
        self._totals += loss[:2].cpu()
        self._losses.append(loss.tolist())
        self._versions.append(self._stream.version(stage, microbatch))
        self._origin = self._origin or self._executor.origin(microbatch)
        self._samples += self._executor.samples[microbatch]
        self._done.append(microbatch)
        self._next = microbatch + self._stream.replicas[stage]

    def update(self, operation: Operation) -> None:
        """Update the stage with the mean gradients since the last update."""
        context, version = self._context, operation.version
        sums = (self._sums.values() or [[None] * len(self._parameters)])[0]
        sums = self._tied.exchange_gradients(self._names, sums)
        statistics = self._changed_buffers()
        totals = torch.cat((self._totals, torch.tensor([self._samples], dtype=torch.float64))).to(context.world.device)
        if self._replicas.size > 1:
            sums, statistics, totals = self._reduce(sums, statistics, totals)
        staleness = [version - 1 - one for one in self._versions]
        context.events.mark("staleness", stage=self._stage, version=version, staleness=staleness)
        context.world.synchronize()
        with self._stash.update(self._stream.version(self._stage, self._next)):
            if self._is_finite(totals):
                self._apply(sums, float(totals[1]), [value.div_(totals[2].item()) for value in statistics])
            self._tied.receive_weights(version)
        self._count += 1
        context.strategy_state[_STATE] = {"updates": self._count}
        self._reset_sums()

    def result(self) -> StepResult:
        """Return the latest update with the mean loss since the last call, or the previous mean without new losses."""
        sums = [math.fsum(column) for column in zip(*self._losses, strict=True)]
        if sums and sums[1]:
            pairs = zip(sums[::2], sums[1::2], strict=True)
            loss, *means = (total / count if count else math.nan for total, count in pairs)
            metrics = dict(zip(self._context.compute.metrics or (), means, strict=True))
            self._result = replace(self._result, loss=loss, metrics=metrics)
            self._losses = []
        return self._result

    def forget_done(self) -> None:
        """Forget the microbatches that have left this worker."""
        for microbatch in self._done:
            self._executor.forget(microbatch)
        self._done = []

    def finish(self) -> None:
        """Reset the stage after the pipeline has drained."""
        self._tied.finish()
        self._stash.reset()
        self._done, self._next = [], 0

    def clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _changed_buffers(self) -> list[torch.Tensor]:
        """Return the changing buffers, weighted by samples and summed over the microbatches."""
        buffers = self._context.compute.buffers
        names = buffers.names_in(self._buffers)
        if not buffers.fixed:
            buffers.fix_part(self._buffers)
        if not (values := (self._statistics.values() or [[]])[0]):  # no microbatch
            return [torch.zeros_like(example) for example in buffers.examples()]
        return [value for name in buffers.live if (value := values[names.index(name)]) is not None]

    def _apply(self, sums: Values, count: float, statistics: list[torch.Tensor]) -> None:
        context = self._context
        for name, parameter, value in zip(self._names, self._parameters, sums, strict=True):
            if value is not None and parameter.requires_grad and not self._tied.is_owned_elsewhere(name):
                parameter.grad = value.div_(count)
        context.compute.buffers.accept(statistics)
        seed_torch(seed_of(UPDATE, context.settings.seed, self._count))
        self._squares = float(context.update.norm()) ** 2
        norm = torch.tensor(math.sqrt(self._squares + sum(self._heard.values())), device=context.world.device)
        _, rate = context.update.apply(self._count, norm=norm)
        self._result = replace(self._result, norm=norm, learning_rate=rate)
        if not self._count:
            check_savable(context.update.optimizer)
        self.clear_gradients()
        self._tied.send_weights()

    def _reduce(
        self, sums: Values, statistics: list[torch.Tensor], totals: torch.Tensor
    ) -> tuple[Values, list[torch.Tensor], torch.Tensor]:
        """Return the sums over the replicas of this stage."""
        if self._reduction is None:
            examples = [*(parameter.detach() for parameter in self._parameters), *statistics, totals]
            exchange = DirectExchange(self._replicas, _TAGS)
            self._reduction = Reduction(self._replicas, exchange, examples, self._context.events, "gradients")
        reduction = self._reduction
        reduction.begin([[Node(0, place)] for place in range(self._replicas.size)], 1.0)
        for member, value in enumerate([*sums, *statistics, totals]):
            (slot,) = reduction.slots(member)
            slot.zero_() if value is None else slot.copy_(value)
            reduction.written(member)
        reduction.finish()
        means = reduction.means()
        return [*means[: len(sums)]], means[len(sums) : -1], means[-1]

    def _is_finite(self, totals: torch.Tensor) -> bool:
        """Return whether the losses of an update are finite. All stages see the same losses."""
        context = self._context
        if totals[1] == 0:
            raise InputError(
                f"The microbatches of an update of stage {self._stage} count 0: there is nothing to take a mean over. "
                f"Update after more microbatches (pipeline.update_every)."
            )
        if totals.isfinite().all():
            return True
        step, microbatch = self._origin or (0, 0)
        part = MicrobatchResult(
            range(microbatch, microbatch + len(self._versions)), context.world.rank, float(totals[0]), 0.0
        )
        error = non_finite(part, part.microbatches, step)
        if context.settings.nonfinite == "stop":
            raise error
        context.events.mark("skipped", step=step, reason=str(error))
        context.update.advance()
        self._tied.send_weights()
        return False
