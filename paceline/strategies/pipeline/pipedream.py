"""Asynchronous pipelines: PipeDream and PipeDream-2BW.

Microbatches stream through from step to step without a pause; each stage updates its weights while others are under
way (:mod:`paceline.schedule.pipedream`). A backward pass uses the version of the weights of its forward pass. So the
result is not that of one process: the gradient of a stage is older the farther the stage is from the end.

A stage knows the loss of a microbatch when its gradient comes back. The global norm of the gradients is that of its own
update and of those of the other stages that it has heard of last. Before an evaluation or a checkpoint, at the end,
and where ``pipeline.flush_every`` says so, the pipeline runs empty.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from paceline.checkpoint.tensors import check_savable
from paceline.comm.reduction.bucketed import BucketedReduction
from paceline.data.feed import Piece
from paceline.data.keys import UPDATE, seed_of, seed_torch
from paceline.errors import InputError
from paceline.schedule.choice import async_pipeline_for
from paceline.schedule.operations import Kind, Operation, Schedule
from paceline.schedule.pipedream import drain, window
from paceline.schedule.tree import Node
from paceline.step.accumulate import ScatteredAccumulator, Values
from paceline.step.checks import Part, check_dense, non_finite
from paceline.step.job import Job, StepResult
from paceline.strategies.base import Strategy
from paceline.strategies.pipeline.executor import Hooks
from paceline.strategies.pipeline.stages import Stages
from paceline.strategies.pipeline.tied_pipedream import TiedPipeDream
from paceline.strategies.pipeline.weight_stash import WeightStash

_BOOK = "pipeline"
_TAGS = 1 << 12
_LOOK_STEPS = 20
"""How often the workers tell each other whether the world is to change."""


class PipeDream(Strategy, Hooks):
    """A pipeline that runs empty only when it must."""

    def __init__(self, job: Job) -> None:
        self._job = job
        job.warnings.append(
            f"schedule {job.settings.pipeline.schedule!r} uses older weights for microbatches under way: the bits are "
            f"not those of one process, and the loss reported is that of the microbatches that have come back"
        )
        self._stream = async_pipeline_for(job.settings.pipeline, job.world.size, job.order.microbatches)
        self.staged = Stages(job, window(self._stream, 0, 2 * sum(self._stream.replicas)))
        (self._stage,) = self.staged.local
        self._held = self.staged.local[self._stage]
        self._executor = self.staged.executor(self)
        self._names = self._held.trained
        self._parameters = [job.update.parameters[name] for name in self._names]
        self._stash = WeightStash(self._parameters)
        self._tied = TiedPipeDream(job, self._stage, self.staged.tied, self._stream)
        self._exchange: BucketedReduction | None = None
        self._turns = math.lcm(*self._stream.replicas)
        self._entered = 0
        self._checked = False
        self._updates = int(job.strategy_state.get(_BOOK, {}).get("updates", 0))
        self._done: list[int] = []
        self._following = 0
        self._returned: list[tuple[float, float]] = []
        self._outcome = StepResult(math.nan, torch.tensor(math.nan), job.update.learning_rate)
        self._begin_group()
        self._squares = 0.0
        self._heard = {True: 0.0, False: 0.0}
        """The sum of the squares of the gradients, of the stages before (what comes forward) and after this one."""

    def attach(self, microbatch: int, forward: bool) -> torch.Tensor:
        squares = torch.tensor([self._squares + self._heard[forward]], dtype=torch.float64)
        told = squares if forward else torch.cat((self._executor.losses[microbatch].cpu(), squares))
        return told.to(self._job.world.device)

    def on_attachment(self, microbatch: int, forward: bool, attachment: torch.Tensor) -> None:
        self._heard[forward] = float(attachment[-1])
        if not forward:
            self._executor.losses[microbatch] = attachment[:2]

    def _begin_group(self) -> None:
        """Count from here to the next update."""
        self._sums, self._statistics = ScatteredAccumulator(False), ScatteredAccumulator(False)
        self._used: list[int] = []
        self._origin: tuple[int, int] | None = None
        self._samples = 0
        self._totals = torch.zeros(2, dtype=torch.float64)

    def pieces(self, step: int) -> list[range]:
        if self._stage not in (0, self.staged.count - 1):
            return []
        rank, stream = self._job.world.rank, self._stream
        numbers = range(len(self._job.order.parts_of(step)))
        return [range(number, number + 1) for number in numbers if stream.worker(self._stage, number) == rank]

    def step(self, step: int, pieces: list[Piece]) -> StepResult:
        job, begin = self._job, self._entered
        job.world.check()
        job.world.await_process_group()
        if self.staged.training_flags.changed or self.staged.requires_grad_flags.changed:
            self._run_empty()
            begin = 0
        self.staged.prepare()
        self.staged.training_flags.save()
        if self.staged.requires_grad_flags.changed:
            self._executor.reset_links()
            self.staged.requires_grad_flags.save()
        if begin % self._turns:  # after a short batch it would be another replica's turn
            self._run_empty()
            begin = 0
        if begin == 0:
            job.compute.buffers.begin()
        job.update.check_frozen()
        for microbatch in self._done:
            self._executor.forget(microbatch)
        self._done = []
        self._entered += len(job.order.parts_of(step))
        self.staged.mark_updated()
        self._executor.add(step, pieces, begin)
        self._executor.run(self._operations(window(self._stream, begin, self._entered)))
        outcome = self._told()
        every = job.settings.pipeline.flush_every
        flushes = every is not None and (step + 1) % every == 0
        if not flushes and (step + 1) % _LOOK_STEPS:
            return outcome
        notice = max(job.world.gather(job.world.notice(), "step"))
        if flushes:
            self._run_empty()
        if notice:  # who leaves must not take the only copy of a stage along
            self.synchronize(step + 1)
        return replace(outcome, notice=notice)

    def synchronize(self, steps: int) -> None:
        self._run_empty()
        self.staged.synchronize()

    def close(self) -> frozenset[str] | None:
        self.staged.close()  # makes room for the parameters of other workers
        for parameter in self._parameters:
            parameter.grad = None
        return self.staged.holds

    def worker_of(self, stage: int, microbatch: int) -> int:
        return self._stream.worker(stage, microbatch)

    def weights(self, operation: Operation) -> AbstractContextManager[object]:
        return self._stash.use(operation.version)

    def on_gradients(self, stage: int, microbatch: int) -> None:
        values: Values = []
        for parameter in self._parameters:
            values.append(parameter.grad)
            parameter.grad = None
        check_dense(self._names, values)
        pair = self._executor.losses[microbatch]
        self._sums.push(microbatch, values)
        made, names = (
            self._executor.statistics[stage][microbatch],
            self._job.compute.buffers.names_in(self._held.buffers),
        )
        self._statistics.push(microbatch, [made[name] for name in names])  # maybe more than are known to change by now
        self._totals += pair.cpu()
        self._returned.append((float(pair[0]), float(pair[1])))
        self._used.append(self._stream.version(stage, microbatch))
        self._origin = self._origin or self._executor.origin(microbatch)
        self._samples += self._executor.samples[microbatch]
        self._done.append(microbatch)
        self._following = microbatch + self._stream.replicas[stage]

    def update(self, operation: Operation) -> None:
        """Update the stage with the mean gradients of the microbatches since the last update."""
        job, version = self._job, operation.version
        sums = (self._sums.values() or [[None] * len(self._parameters)])[0]
        sums = self._tied.exchange_gradients(self._names, sums)
        made = self._changed_buffers()
        totals = torch.cat((self._totals, torch.tensor([self._samples], dtype=torch.float64))).to(job.world.device)
        if self.staged.replicas.size > 1:
            sums, made, totals = self._team_sums(sums, made, totals)
        staleness = [version - 1 - one for one in self._used]
        job.events.mark("staleness", stage=self._stage, version=version, staleness=staleness)
        with self._stash.update(self._stream.version(self._stage, self._following)):
            if self._is_finite(totals):
                self._apply(sums, float(totals[1]), [value.div_(totals[2].item()) for value in made])
            self._tied.receive_weights(version)
        self._updates += 1
        job.strategy_state[_BOOK] = {"updates": self._updates}
        self._begin_group()

    def _changed_buffers(self) -> list[torch.Tensor]:
        """What the forward passes of these microbatches made of the buffers that change, times the samples."""
        buffers = self._job.compute.buffers
        known = buffers.names_in(self._held.buffers)
        if not buffers.settled:
            buffers.settle_part(self._held.buffers)
        values = (self._statistics.values() or [[]])[0]
        if not values:  # no microbatch: nothing that would change the sum
            return [torch.zeros_like(example) for example in buffers.examples()]
        return [value for name in buffers.live if (value := values[known.index(name)]) is not None]

    def _apply(self, sums: Values, count: float, statistics: list[torch.Tensor]) -> None:
        job = self._job
        for name, parameter, value in zip(self._names, self._parameters, sums, strict=True):
            if value is not None and parameter.requires_grad and not self._tied.is_owned_elsewhere(name):
                parameter.grad = value.div_(count)
        job.compute.buffers.accept(statistics)
        seed_torch(seed_of(UPDATE, job.settings.seed, self._updates))
        self._squares = float(job.update.norm()) ** 2
        norm = torch.tensor(math.sqrt(self._squares + sum(self._heard.values())), device=job.world.device)
        _, rate = job.update.apply(self._updates, norm=norm)
        self._outcome = replace(self._outcome, norm=norm, learning_rate=rate)
        if not self._updates:
            check_savable(job.update.optimizer)
        for parameter in self._parameters:
            parameter.grad = None
        self._tied.send_weights()

    def _team_sums(
        self, sums: Values, made: list[torch.Tensor], totals: torch.Tensor
    ) -> tuple[Values, list[torch.Tensor], torch.Tensor]:
        """The sums over the workers that hold this stage."""
        job, team = self._job, self.staged.replicas
        if self._exchange is None:
            examples = [*(parameter.detach() for parameter in self._parameters), *made, totals]
            self._exchange = BucketedReduction(team, examples, job.events, "gradients", _TAGS)
        exchange = self._exchange
        exchange.begin([[Node(0, place)] for place in range(team.size)], lambda: 1.0)
        for member, value in enumerate([*sums, *made, totals]):
            (slot,) = exchange.slots(member)
            slot.zero_() if value is None else slot.copy_(value)
            exchange.written(member)
        exchange.finish()
        means = [exchange.mean(member) for member in range(exchange.members)]
        return [*means[: len(sums)]], means[len(sums) : -1], means[-1]

    def _is_finite(self, totals: torch.Tensor) -> bool:
        """Whether the losses of an update are; all stages see the same ones.

        Raises:
            NonFiniteLoss: they are not, and the run is to stop.
            InputError: the losses count nothing.
        """
        job = self._job
        if totals[1] == 0:
            raise InputError(
                f"The microbatches of an update of stage {self._stage} count 0: there is nothing to take a mean over. "
                f"Update after more microbatches (pipeline.update_every)."
            )
        if totals.isfinite().all():
            return True
        step, microbatch = self._origin or (0, 0)
        part = Part(range(microbatch, microbatch + len(self._used)), job.world.rank, float(totals[0]), 0.0)
        error = non_finite(part, part.microbatches, step)
        if job.settings.nonfinite == "stop":
            raise error
        job.events.mark("skipped", step=step, reason=str(error))
        job.update.advance()
        self._tied.send_weights()
        return False

    def _operations(self, schedule: Schedule) -> list[Operation]:
        return [one for one in schedule.workers[self._job.world.rank] if one.kind is not Kind.REDUCE]

    def _told(self) -> StepResult:
        """The mean loss of the microbatches whose gradients came back in this step; if none did, what was told last."""
        count = math.fsum(count for _, count in self._returned)
        if count:
            loss = math.fsum(loss for loss, _ in self._returned) / count
            self._outcome = replace(self._outcome, loss=loss)
            self._returned = []
        return self._outcome

    def _run_empty(self) -> None:
        """Do what is left to do for the microbatches under way, and count from the start again."""
        if not self._entered:
            return
        training, grads = self.staged.training_flags, self.staged.requires_grad_flags
        with training.set_to(training.saved), grads.set_to(grads.saved):
            self._executor.run(self._operations(drain(self._stream, self._entered)))
        self._executor.finish()
        self._tied.finish()
        self._executor.reset()
        if not self._checked:
            live = self._job.world.gather(self._job.compute.buffers.agreed, "step")
            self._job.compute.buffers.settle(name for names in live for name in names)
            self.staged.check_buffers()
            self._job.compute.buffers.restrict(self._held.buffers)
            self._checked = True
        self._stash.reset()
        self._entered, self._done, self._following = 0, [], 0
