"""Steps and their records: take one, repeat lost ones, synchronize, save, and follow the notice of a step."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from pathlib import Path

from paceline import env, fault_points
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.training_state import TrainingState
from paceline.comm.world import LEAVING
from paceline.data.feed import Piece
from paceline.errors import PREEMPTED, InputError
from paceline.step.job import Batch, Job, StepResult
from paceline.step.replicas import compare
from paceline.step.trials.first_step import try_forward_pass
from paceline.strategies.phases import Phases
from paceline.strategies.registry import capabilities
from paceline.training.position import Position
from paceline.training.script_state import ScriptState
from paceline.training.workers import Workers
from paceline.verify.trace_writer import TraceWriter

_log = logging.getLogger("paceline")


class Steps:
    """Takes the steps of a run, and keeps their records.

    Args:
        job: what is trained.
        workers: with whom.
        state: of the training.
        checkpointer: saves checkpoints.
        script: what the script keeps.

    Attributes:
        position: of the script.
    """

    def __init__(
        self, job: Job, workers: Workers, state: TrainingState, checkpointer: Checkpointer, script: ScriptState
    ) -> None:
        self._job = job
        self._workers = workers
        self._state = state
        self._checkpointer = checkpointer
        self._script = script
        self.position = Position(job, workers, self.synchronize, self._end_batch)
        self._taken = -1, 0  # the step whose batch the script gave last, and how often: its phases
        self._saved = -1  # the position at which the script saved
        self._begun = -1  # the step of the last save that was due
        self._notice = 0
        traced = env.trace()
        self._trace = None if traced is None else TraceWriter(traced, job, state.tensors)

    @property
    def last(self) -> int | None:
        """The number of steps after which the run ends, if it is one that is recorded."""
        return None if self._trace is None else self._trace.steps

    def step(self, batch: Batch, phase: str = "") -> tuple[StepResult, float]:
        """Take a step, or a phase of it; see :meth:`TrainingLoop.step`."""
        if not isinstance(batch, Batch):
            raise InputError(f"session.step takes a batch from session.batches(), not a {type(batch).__name__}.")
        workers, position = self._workers, self.position
        if not phase and (batch.step < position.steps - 1 or batch.step == self._taken[0]):
            raise InputError(self._over(batch.step))
        turn = self._turn_of(batch) if phase else 0
        begin = time.perf_counter()
        self._job.loop.look(begins=True)
        self._check_loop(batch.step)
        if not turn:
            workers.progress.entered = batch.step
        others_did = workers.progress.has_received(batch.step, turn)  # it is in their records
        result = workers.take(lambda: self._take(batch, phase, turn))
        if not turn:  # all phases of the last batch come once more in a resumed script
            self._script.keep()
        self._job.loop.end_step(batch.step)
        self._taken = batch.step, turn + 1
        position.move_to(batch.step + 1, turn=turn)
        position.used += 1
        waited = 0.0 if turn else batch.waited
        seconds = time.perf_counter() - begin + waited
        if not others_did and workers.progress.steps == batch.step + 1:  # else the result is that of a later step
            self._record(batch.step, result, seconds, waited, phase, turn)
            if self._trace is not None and not turn:
                samples = self._job.order.samples_before(batch.step + 1)
                self._trace.step(batch.step, result.loss, samples, result.learning_rate)
        self._notice = max(self._notice, result.notice)
        if not phase:
            self._conclude()
        return result, seconds

    def _over(self, step: int) -> str:
        if self._taken[0] == step:
            return (
                f"The batch of step {step} was given to session.step before: it has made its update. Call "
                f"session.step once for each batch; for more updates take a smaller batch or more epochs."
            )
        return (
            f"The batch of step {step} is over: the script already has later ones. Give each batch to session.step "
            f"once, before you take the next."
        )

    def _check_loop(self, step: int) -> None:
        """Refuse weights changed by the loop where this worker does not hold those that are trained.

        Raises:
            InputError: names a parameter.
        """
        name, settings = self._job.loop.parameter, self._job.settings
        if name and not capabilities(settings, self._job.world.size).loop_weights:
            raise InputError(
                f"The loop has changed the parameter {name!r} before step {step}. With strategy {settings.strategy!r} "
                f"a worker does not hold the weights that are trained, so the change would be lost, or made several "
                f"times. Use strategy 'allreduce' or 'stealing'; average='ema' keeps an average of the weights."
            )

    def _turn_of(self, batch: Batch) -> int:
        """How many phases the script has taken of this batch.

        Raises:
            InputError: the batch is over.
        """
        step, turns = self._taken if self._taken[0] == batch.step else (batch.step, 0)
        if step < self.position.steps - 1 or (turns and self._saved == step + 1):
            why = "the script has saved after it" if step == self.position.steps - 1 else "the script has the next one"
            raise InputError(
                f"The batch of step {step} is over: {why}. Take all phases of a batch one after the other, and save "
                f"after the last."
            )
        return turns

    def _end_batch(self) -> None:
        """The script is done with a batch. Of several phases nobody knows before which one is the last."""
        if self._job.phases:
            self._conclude()

    def _conclude(self) -> None:
        """Save if it is time, and follow what was heard in the step."""
        steps, notice, self._notice = self.position.steps, self._notice, 0
        if steps == self._workers.progress.steps and self._due(steps):
            self._begun = -1
            self._workers.retry(lambda: self.meet("synchronizing"))
            if self._begun != steps:  # else it was repeated on the way, and saved then
                self._begin_save()
        self.follow(notice)

    def _take(self, batch: Batch, phase: str, turn: int) -> StepResult:
        step, activity = batch.step, self._workers.activity
        progress = self._workers.progress
        if progress.has_received(step, turn):
            known = progress.result_of(turn) or StepResult(math.nan, math.nan, math.nan, applied=False)
            return replace(known, notice=0)  # the workers have re-formed since
        self._repeat_lost_steps(step)
        begin = time.perf_counter()
        pieces = batch.pieces
        if batch.generation != self._job.world.generation:
            pieces = self._job.feed.load(step, self._workers.strategy.pieces(step))
        progress = self._workers.progress
        progress.left_out.update(range(progress.steps, step))
        progress.left_out.discard(step)
        activity.begin("computing")
        strategy = self._workers.strategy
        if isinstance(strategy, Phases):
            strategy.choose(phase, turn)
        result = self._run_step(step, pieces)
        activity.step_done(time.perf_counter() - begin)
        progress.take(step, result, turn if phase else None)
        activity.begin("in the script")
        return result

    def _run_step(self, step: int, pieces: list[Piece]) -> StepResult:
        job = self._job
        if not (job.learned.repeatable or job.phases):
            self._try(step, pieces)
            job.learned.repeatable = True
        fault_points.reach("before forward", step)
        result = self._workers.strategy.step(step, pieces)
        self._workers.loads_ahead = True
        return result

    def _try(self, step: int, pieces: list[Piece]) -> None:
        """Try the forward pass and the loss before the first step, unless others change the weights meanwhile."""
        job = self._job
        if not (job.settings.exact or job.replicated):
            return
        try_forward_pass(job, pieces or job.feed.load(step, [range(1)]), step)

    def _repeat_lost_steps(self, stop: int) -> None:
        """After going back to a checkpoint, repeat the steps below ``stop`` that the script has seen."""
        workers = self._workers
        while (step := workers.progress.steps) < min(stop, workers.progress.repeat_until):
            notice = 0
            if step not in workers.progress.left_out:
                workers.activity.begin("repeating lost steps")
                begin = time.perf_counter()
                pieces = self._job.feed.load(step, workers.strategy.pieces(step))
                result = self._run_step(step, pieces)
                workers.progress.result, notice = result, result.notice
                self._job.loop.end_step(step)
                self._record(step, result, time.perf_counter() - begin, 0.0)
            workers.progress.steps = step + 1
            if self._due(step + 1):
                workers.strategy.synchronize(step + 1)
                self._begin_save()
            self.follow(notice)

    def _due(self, steps: int) -> bool:
        """Whether to save now; not while the registered values are those of a later step."""
        ahead = steps < self._workers.progress.repeat_until and bool(self._script.values)
        return self._checkpointer.due(steps) and not ahead

    def _record(
        self, step: int, result: StepResult, seconds: float, waited: float, phase: str = "", turn: int = 0
    ) -> None:
        """Keep a record of a step; of a batch with several phases each has one, but the first is the step's."""
        samples = self._job.order.samples_of(step)
        metrics = {"metrics": result.metrics} if result.metrics else {}
        self._job.events.mark(
            "phase" if turn else "step",
            **({"optimizer": phase} if phase else {}),
            step=step,
            seconds=seconds,
            waited=waited,
            loss=result.loss,
            samples=samples,
            samples_per_second=samples / seconds,
            gradient_norm=float(result.norm),
            learning_rate=result.learning_rate,
            **metrics,
        )

    def synchronize(self) -> None:
        """Bring all workers to the same state; all call this at the same step."""
        workers = self._workers

        def act() -> None:
            if self.position.asked < workers.progress.repeat_until:  # the others repeat the steps up to there
                return
            self.meet("synchronizing")
            steps = self.position.asked
            if self._job.settings.exact and workers.progress.compared < steps:  # else the others are beyond that
                compare(self._job, "synchronizing")
                workers.progress.compared = steps

        workers.retry(act)
        workers.activity.begin("in the script")

    def meet(self, doing: str) -> None:
        """Come to the position of the script, with all others; :meth:`Workers.retry` is around this."""
        self._workers.activity.begin(doing)
        self._repeat_lost_steps(self.position.steps)
        self._workers.strategy.synchronize(self._workers.progress.steps)

    def save(self) -> Path | str:
        """Save the state after the steps done and wait for it; all call this together."""
        self.synchronize()
        activity = self._workers.activity
        activity.begin("saving a checkpoint", busy=True)
        place = self._checkpointer.save(self._state, self._workers.progress.steps)
        self._saved = self._workers.progress.steps
        activity.begin("in the script")
        return place

    def _begin_save(self) -> None:
        """Save the state in the background, after the workers have been synchronized."""
        activity = self._workers.activity
        activity.begin("saving a checkpoint", busy=True)
        self._begun = self._workers.progress.steps
        self._checkpointer.begin_save(self._state, self._begun)
        activity.begin("in the script")

    def follow(self, notice: int) -> None:
        """Act on the notice of a step: re-form if the world is to change, or save and stop.

        Raises:
            SystemExit: this worker's part is over, or the run's.
        """
        if notice < LEAVING and self._job.loop.lacks_copies:  # joiners come after the next step
            return
        if not notice or self._workers.change() or notice < LEAVING:
            return
        world, place = self._job.world, self.save()
        if world.rank == 0:
            _log.warning("preempted: the state after step %d is in %s", self._workers.progress.steps - 1, place)
        world.gather(None, "leaving")  # nobody ends before the checkpoint is there
        self._job.events.mark("departure", code=PREEMPTED, reason="preempted")
        raise SystemExit(PREEMPTED)
