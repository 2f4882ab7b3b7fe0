"""Training as one worker takes it: from step to step, through losses, joins and notices.

With a coordinator, a lost worker does not end training: what was under way is dropped, the workers re-form
(``recovery.recovery``), and it is done again with other shares.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from paceline import env, evaluation, fault_points
from paceline.agreement import check
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.training_state import TrainingState
from paceline.comm.world import LEAVING
from paceline.data.feed import Piece
from paceline.data.keys import LOOP, seed_all, seed_of
from paceline.errors import PREEMPTED, ConfigError, WorkerLost
from paceline.recovery.activity import RE_FORMING, Activity
from paceline.recovery.progress import Progress
from paceline.recovery.recovery import Recovery
from paceline.step.job import Batch, Job, StepResult
from paceline.step.repeatability import check_repeatable
from paceline.step.replicas import compare
from paceline.strategies.base import Strategy
from paceline.strategies.registry import build, capabilities
from paceline.verify.trace_writer import TraceWriter

_T = TypeVar("_T")
_log = logging.getLogger("paceline")


class TrainingLoop:
    """Takes the steps and evaluations that the script asks for; owns the progress of this worker.

    Args:
        job: what is trained; its workers have not met yet.
        facts: on which all workers must agree.
        state: of the training.
        checkpointer: saves and loads checkpoints.
        resume: the checkpoint to start from, if any.

    Attributes:
        position: how many steps the script has come past.
        strategy: of the present workers.
    """

    strategy: Strategy

    def __init__(
        self, job: Job, facts: dict[str, object], state: TrainingState, checkpointer: Checkpointer, resume: str | None
    ) -> None:
        self._job = job
        self._facts = facts
        self._checkpointer = checkpointer
        self._state = state
        self._resume = resume
        self._progress: Progress | None = None
        self._strategy_ready = False
        self._activity = Activity(job.world)
        self._closed = False
        self.position = 0
        self._target = 0  # the position at which the last call of batches() ends
        self._given = -1  # the last step whose batch the script got
        self._evaluated = 0, 0  # after how many steps the script last evaluated, and how often
        self._running: Generator[Batch, None, None] | None = None
        fault_points.arm(lambda: -1 if self._progress is None else job.world.rank)
        coordinator = job.world.coordinator
        self._recovery: Recovery | None = None
        if coordinator is None:
            job.world.rendezvous()
            self._progress = Progress(self._begin())
            self._set_up_strategy()
        else:
            self._recovery = Recovery(job, coordinator, state, checkpointer, self._begin)
            self._recovery.register(
                facts, lambda: self._activity.status(0 if self._progress is None else self._progress.steps)
            )
            self._re_form()
            self._await_process_group()
        self._move_to(self.progress.steps)
        traced = env.trace()
        self._trace = None if traced is None else TraceWriter(traced, job, state.tensors)

    @property
    def progress(self) -> Progress:
        """How far this worker is: ahead of the position once it has received the state of another one."""
        assert self._progress is not None
        return self._progress

    def batches(self, count: int) -> Iterator[Batch]:
        """Iterate over the batches of the next ``count`` steps; the iterator before ends."""
        if self._running is not None:
            self._running.close()
            self._target = min(self._target, self.position)
        self._target += count
        self._running = self._batches_until(self._target)
        return self._running

    def _batches_until(self, target: int) -> Generator[Batch, None, None]:
        if self._trace is not None:
            target = min(target, self._trace.steps)
        self._job.events.mark("batches", position=self.position, steps=target)
        while True:
            if self.progress.steps > self.position:
                self._move_to(self.progress.steps)
            last = self.progress.received - 1
            if self._given < last < target and self.progress.result is not None:
                # The others may be in the middle of what the script does after this step, such as an evaluation: so
                # this worker gets its batch, too, and step() returns their result.
                self._move_to(last, before=True)
                yield self._batch(last, [], 0.0, self._job.world.generation)
            elif self.position < target:
                yield from self._load(self.position, target if self._loads_ahead else self.position + 1)
            else:
                self.synchronize()
                if self.progress.steps <= self.position:
                    return

    def _load(self, start: int, stop: int) -> Iterator[Batch]:
        """Load the batches of some steps, until the workers change: then this one computes other pieces."""
        generation, before = self._job.world.generation, time.perf_counter()
        self._activity.begin("in the data loader")
        for step, pieces in enumerate(self._job.feed.steps(start, stop, self.strategy.pieces), start):
            self._activity.begin("in the script")
            waited = time.perf_counter() - before
            self._move_to(step, before=True)
            yield self._batch(step, pieces, waited, generation)
            if self.position == step:
                self._leave_out(step)
            if self._job.world.generation != generation:
                return
            before = time.perf_counter()
            self._activity.begin("in the data loader")

    def _batch(self, step: int, pieces: list[Piece], waited: float, generation: int) -> Batch:
        order, self._given = self._job.order, step
        last = (step + 1) % order.steps_per_epoch == 0
        return Batch(step, order.epoch_of(step), order.samples_of(step), last, pieces, waited, generation)

    def _leave_out(self, step: int) -> None:
        """Pass over a step whose batch the script did not give to :meth:`step`."""
        self.progress.left_out.add(step)
        if self.progress.steps == step:
            self.progress.steps = step + 1
        self._move_to(step + 1)

    def _move_to(self, position: int, before: bool = False) -> None:
        """Set the position, and with it the random numbers that the script draws now: after a step, or before one."""
        self.position = position
        seed_all(seed_of(LOOP, self._job.settings.seed, position, before))

    def step(self, batch: Batch) -> tuple[StepResult, float]:
        """Take a step; return its result, and the seconds it took, the loading of the batch included.

        Raises:
            WorkerLost: there are not enough workers left.
            SystemExit: this worker's part is over, or the run's.
        """
        self._check_open()
        begin = time.perf_counter()
        result = self._retry(lambda: self._take(batch))
        self._move_to(batch.step + 1)
        seconds = time.perf_counter() - begin + batch.waited
        if batch.step >= self.progress.received:  # else it is in the records of the workers that took it
            self._record(batch.step, result, seconds, batch.waited)
            if self._trace is not None:
                samples = self._job.order.samples_before(batch.step + 1)
                self._trace.step(batch.step, result.loss, samples, result.learning_rate)
        if self.position == self.progress.steps and self._checkpointer.due(self.position):
            self._retry(lambda: self._synchronize("synchronizing"))
            self._begin_save()
        self._follow(result.notice)
        return result, seconds

    def _take(self, batch: Batch) -> StepResult:
        step = batch.step
        if step < self.progress.received:  # others have taken it
            known = self.progress.result or StepResult(math.nan, math.nan, math.nan, applied=False)
            return replace(known, notice=0)  # the workers have re-formed since
        self._repeat_lost_steps(step)
        begin = time.perf_counter()
        pieces = batch.pieces
        if batch.generation != self._job.world.generation:
            pieces = self._job.feed.load(step, self.strategy.pieces(step))
        progress = self.progress
        progress.left_out.update(range(progress.steps, step))
        progress.left_out.discard(step)
        self._activity.begin("computing")
        result = self._run_step(step, pieces)
        self._activity.step_done(time.perf_counter() - begin)
        progress.steps, progress.result = step + 1, result
        self._activity.begin("in the script")
        return result

    def _run_step(self, step: int, pieces: list[Piece]) -> StepResult:
        job = self._job
        shared = not (job.settings.exact or job.replicated)  # others may change the weights meanwhile
        if not job.learned.repeatable and not shared:
            job.learned.repeatable = True
            first = pieces[0] if pieces else job.feed.load(step, [range(1)])[0]
            check_repeatable(job, first, step)
        fault_points.reach("before forward", step)
        result = self.strategy.step(step, pieces)
        self._loads_ahead = True
        return result

    def _repeat_lost_steps(self, stop: int) -> None:
        """After going back to a checkpoint, repeat the steps below ``stop`` that the script has seen."""
        while (step := self.progress.steps) < min(stop, self.progress.repeat_until):
            notice = 0
            if step not in self.progress.left_out:
                self._activity.begin("repeating lost steps")
                begin = time.perf_counter()
                pieces = self._job.feed.load(step, self.strategy.pieces(step))
                result = self._run_step(step, pieces)
                self.progress.result, notice = result, result.notice
                self._record(step, result, time.perf_counter() - begin, 0.0)
            self.progress.steps = step + 1
            if self._checkpointer.due(step + 1):
                self.strategy.synchronize(step + 1)
                self._begin_save()
            self._follow(notice)

    def _record(self, step: int, result: StepResult, seconds: float, waited: float) -> None:
        samples = self._job.order.samples_of(step)
        self._job.events.mark(
            "step",
            step=step,
            seconds=seconds,
            waited=waited,
            loss=result.loss,
            samples=samples,
            samples_per_second=samples / seconds,
            gradient_norm=float(result.norm),
            learning_rate=result.learning_rate,
        )

    def evaluate(self, forward: Callable[..., Any], data: Any) -> float:
        """Return the mean of a metric; a worker that joined later gets the results of evaluations before that.

        Raises:
            InputError, DisagreementError: see :func:`paceline.evaluation.evaluate`.
            WorkerLost: there are not enough workers left.
        """
        self._check_open()
        steps = min(self.position, self._target)
        number = self._evaluated[1] if self._evaluated[0] == steps else 0
        with self._job.events.span("evaluate", step=self.position):
            value = self._retry(lambda: self._evaluate(steps, number, forward, data))
        self._evaluated = steps, number + 1
        self._move_to(self.position)
        return value

    def _evaluate(self, steps: int, number: int, forward: Callable[..., Any], data: Any) -> float:
        while number >= len(self.progress.evaluations.get(steps, ())):
            self._synchronize("evaluating")
            value, notice = evaluation.evaluate(self._job, self.progress.steps, forward, data)
            self.progress.evaluations.setdefault(steps, []).append(value)
            self._follow(notice)
        self._activity.begin("in the script")
        return self.progress.evaluations[steps][number]

    def synchronize(self) -> None:
        """Bring all workers to the same state; all call this at the same step.

        Raises:
            DisagreementError: with ``exact``, their states are not the same.
            WorkerLost: there are not enough workers left.
        """

        def act() -> None:
            self._synchronize("synchronizing")
            steps = min(self.position, self._target)
            if self._job.settings.exact and self.progress.compared < steps:  # else the others are beyond that
                compare(self._job, "synchronizing")
                self.progress.compared = steps

        self._retry(act)
        self._activity.begin("in the script")

    def _synchronize(self, doing: str) -> None:
        self._activity.begin(doing)
        self._repeat_lost_steps(self.position)
        self.strategy.synchronize(self.progress.steps)

    def save(self) -> Path | str:
        """Save the state after the steps done and wait for it; all call this together."""
        self.synchronize()
        self._activity.begin("saving a checkpoint", busy=True)
        place = self._checkpointer.save(self._state, self.progress.steps)
        self._activity.begin("in the script")
        return place

    def _begin_save(self) -> None:
        """Save the state in the background, after the workers have been synchronized."""
        self._activity.begin("saving a checkpoint", busy=True)
        self._checkpointer.begin_save(self._state, self.progress.steps)
        self._activity.begin("in the script")

    def close(self) -> None:
        """Leave the others, once all have come so far: another session follows in this process."""
        world = self._job.world
        with contextlib.suppress(WorkerLost):
            self.strategy.synchronize(self.progress.steps)
            world.gather(None, "start")
        self.strategy.close()
        world.end_servers()
        if world.coordinator is not None:
            world.leave()
            world.coordinator.report(dict)  # the next session has a client of its own
        self._closed = world.coordinator is not None or world.size > 1

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError(
                "This session ended when the script started the next one: on several workers they train one after "
                "the other. Put models that are trained in turns into one module, with one session."
            )

    # How the workers come together, and what follows when they change.

    def _begin(self) -> int:
        """Compare what is to be trained, and load the checkpoint to go on from, if any: nobody has a state yet."""
        check(self._job.world, self._facts)
        # In a later generation all that had a state are lost.
        again = self._resume is None and self._job.world.generation > 0 and self._checkpointer.enabled
        return self._checkpointer.resume(self._state, "auto" if again else self._resume)

    def _set_up_strategy(self) -> None:
        world = self._job.world
        self.strategy = build(self._job)
        self._loads_ahead = False  # its first step may change how it cuts a share
        able = capabilities(self._job.settings, world.size)
        if not able.replicated and not able.cuts_model and world.coordinator is not None:
            self.progress.tie_break = world.coordinator.number + 1
        self._strategy_ready = True

    def _await_process_group(self) -> None:
        """Wait for torch's process group, which the script may use as soon as it goes on."""
        while self._job.world.generation == 0:
            try:
                self._job.world.await_process_group()
                return
            except WorkerLost as lost:
                self._re_form(lost=lost)

    def _retry(self, act: Callable[[], _T]) -> _T:
        """Do what all workers do together; again with those that are left if one is lost meanwhile."""
        while True:
            try:
                return act()
            except WorkerLost as lost:
                if self._recovery is None:
                    raise
                self._re_form(lost=lost)

    def _re_form(self, planned: bool = False, lost: WorkerLost | None = None) -> None:
        """Drop what is under way, and go on with the next members."""
        assert self._recovery is not None
        while True:
            ended = self._job.world.worker_ids(lost.ranks) if lost is not None else []
            self._activity.begin(RE_FORMING)
            if self._strategy_ready:
                self._strategy_ready = False
                self.progress.holds = self.strategy.close()
                self._job.compute.buffers.reset()
            self._progress = self._recovery.re_form(self._progress, planned, ended)
            try:
                self._set_up_strategy()
                return
            except WorkerLost as again:
                planned, lost = False, again

    def _follow(self, notice: int) -> None:
        """Act on the notice of a step: re-form if the world is to change, or save and stop.

        Raises:
            SystemExit: this worker's part is over, or the run's.
        """
        if not notice:
            return
        world = self._job.world
        if self._recovery is not None:
            self._recovery.prepare_to_leave()
            self._re_form(planned=True)
        elif notice >= LEAVING:
            place = self.save()
            if world.rank == 0:
                _log.warning("preempted: the state after step %d is in %s", self.progress.steps - 1, place)
            world.gather(None, "leaving")  # nobody ends before the checkpoint is there
            self._job.events.mark("departure", code=PREEMPTED, reason="preempted")
            raise SystemExit(PREEMPTED)
