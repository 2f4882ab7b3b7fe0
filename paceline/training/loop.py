"""Training loop: take a step, record it, save a checkpoint if one is due, and act on the step's notice.

::

    step    detect changes by the script ─ take (repeat lost steps, compute, update) ─ record ─ save? ─ act on notice
              ▲                              │ WorkerLost                                               │
              └───────────── re-form ◄───────┴──────────────────────────────────────────────────────────┘

With a coordinator, the workers re-form after a loss (``training.recovery``) and repeat the interrupted operation.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from paceline.comm.world import LEAVING
from paceline.data.feed import MicrobatchGroup
from paceline.errors import PREEMPTED, ConfigError, WorkerLost
from paceline.partition.flags import requires_grad_flags
from paceline.planning.budget import MemoryBudget
from paceline.step.context import Batch, StepResult, TrainingContext
from paceline.step.probes.first_step import try_forward_pass
from paceline.step.probes.probe import warn
from paceline.step.replicas import compare
from paceline.strategies.base import Strategy
from paceline.strategies.phases import Phases
from paceline.strategies.registry import build, capabilities_here, check_loop_changes, check_saving
from paceline.system import fault_points
from paceline.training.position import Position
from paceline.training.progress import Action, Call, CallResults, Progress, decide
from paceline.training.records import Records
from paceline.training.recovery.activity import RE_FORMING, Activity
from paceline.training.recovery.beginning import Beginning
from paceline.training.recovery.recovery import Recovery
from paceline.training.recovery.state_shards import hash_shares
from paceline.training.script_state import ScriptState

_log = logging.getLogger("paceline")
_T = TypeVar("_T")


class TrainingLoop:
    """Training loop with the current workers, and sole owner of this worker's progress."""

    strategy: Strategy

    def __init__(
        self, beginning: Beginning, script: ScriptState, build: Callable[[TrainingContext], Strategy] = build
    ) -> None:
        self.context = context = beginning.context
        self._state, self._checkpointer, self._formation = beginning.state, beginning.checkpointer, beginning.formation
        self._script, self._build = script, build
        self._progress: Progress | None = None
        self._strategy_ready = self._closed = False
        self._memory = MemoryBudget(context)
        self.records = Records(context, beginning.state)
        self.activity = Activity(context.world)  # current activity of this worker, for hang detection
        self.loads_ahead = False  # whether batches after the next one may be prefetched
        beginning.state.divided = lambda: self.strategy.divided if self._strategy_ready else None
        self._notice = 0  # notice of the current step
        self._recovery: Recovery | None = None
        fault_points.arm(lambda: -1 if self._progress is None else context.world.rank)
        if context.world.coordinator is None:
            beginning.formation.rendezvous()
            self._take_over(beginning.begin())
            self._set_up_strategy()
        else:
            self._recovery = Recovery(
                context.world.coordinator, beginning, script.keep_step, lambda norm: self.strategy.decide(norm)
            )
            self._recovery.register(lambda: self.activity.status(0 if self._progress is None else self._progress.steps))
            self._re_form()
            self._try_until_done(self._await_process_group)
        self.position = Position(context.settings.seed, self.progress.steps)

    @property
    def progress(self) -> Progress:
        """Progress of this worker, which is ahead of its script after it has received another worker's state."""
        assert self._progress is not None
        return self._progress

    def step(self, batch: Batch, phase: str = "") -> tuple[StepResult, float]:
        """Take a step. Return its result and its duration in seconds, including the loading of the batch.

        If a batch has several phases, ``phase`` is the name of an optimizer, and the result is that of its phase.

        Raises:
            SystemExit: the run has ended, or this worker leaves it.
        """
        self.check_open()
        context, position = self.context, self.position
        turn = position.check(batch, bool(phase))
        begin = self.records.begin()
        context.loop.record_changes(begins=True)
        context.audits.add_changes(batch.step, context.loop.take_changes())
        check_loop_changes(context.settings, context.world.size, context.loop.parameter, batch.step)
        if not turn:
            self.progress.entered = batch.step
            self._script.begin_step()
        others_did = self.progress.has_received(batch.step, turn)  # the step is in the records of other workers
        if not others_did and (lost := context.loop.not_restored()):  # else the code after the step has yet to run
            warn(context, lost)
        if unused := context.loop.without_effect(batch.step):
            warn(context, unused)
        result = self._try_until_done(lambda: self._take(batch, phase, turn))
        if not turn:  # a resumed script repeats all phases of the last batch
            self._script.keep()
        context.loop.end_step(batch.step)
        position.take(batch.step, turn)
        waited = 0.0 if turn else batch.waited
        seconds = time.perf_counter() - begin + waited
        self._notice = max(self._notice, result.notice)  # outdated if the workers re-form now
        self._together(lambda: self._settle(batch.step + 1))
        if not others_did and self.progress.steps == batch.step + 1:  # else the result belongs to a later step
            if self.records.needs_whole_state:
                self._together(lambda: self.strategy.unite(batch.step + 1))
            self.records.add(batch.step, result, seconds, waited, phase, turn)
        if not phase:
            self._conclude(others_did)
        return result, seconds

    def end_batch(self) -> None:
        """Conclude a batch of several phases when the script has finished it: only then is the last phase known."""
        if self.context.phases:
            self._conclude()

    def leave_out(self, step: int) -> None:
        """Skip a step whose batch the script did not pass to :meth:`step`."""
        self.progress.leave_out(step)
        self.position.move_to(step + 1)

    def _settle(self, steps: int) -> None:
        """Settle the step that was done, and keep the state after it if the workers would return to it after a loss."""
        self._repeat_lost_steps(steps)
        self.strategy.settle()
        if self._recovery is not None and self.progress.steps == steps and not self._script.is_ahead(steps):
            self._recovery.keep(self.progress, self.strategy)
        hash_shares(self.strategy, self.progress)

    def _conclude(self, others_did: bool = False) -> None:
        """Save a checkpoint if one is due and others have not saved it, then act on the notice of the step."""
        steps = self.position.steps
        unsaved = not others_did or self._checkpointer.lacks(self._state, steps)  # else others have saved it
        unsaved &= steps == self.progress.steps
        if unsaved and self._checkpointer.due(steps) and not self._script.is_ahead(steps):
            self._together(lambda: self._meet_and_save(steps))
        notice, self._notice = self._notice, 0
        self._follow(notice)

    def _meet_and_save(self, steps: int) -> None:
        self._meet("synchronizing")
        if self._checkpointer.made != steps:  # else the step was repeated in a recovery, and saved then
            self._begin_save()

    def _take(self, batch: Batch, phase: str, turn: int) -> StepResult:
        step, progress = batch.step, self.progress
        if progress.has_received(step, turn):
            known = progress.result_of(turn) or StepResult(math.nan, math.nan, math.nan, applied=False)
            return replace(known, notice=0)  # the notice is outdated: the workers have re-formed since
        self._repeat_lost_steps(step)
        begin, groups = time.perf_counter(), batch.groups
        if batch.generation != self.context.world.generation:
            groups = self.context.feed.load(step, self.strategy.groups(step))
        progress = self.progress
        progress.left_out.update(range(progress.steps, step))
        progress.left_out.discard(step)
        self.activity.begin("computing")
        if isinstance(self.strategy, Phases):
            self.strategy.choose(phase, turn)
        result = self._run_step(step, groups)
        self.activity.step_done(time.perf_counter() - begin)
        progress.take(step, result, turn if phase else None)
        self.activity.begin("in the script")
        return result

    def _run_step(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        context, groups = self.context, self.context.feed.receive(step, groups, self.context.events)
        if not (context.phases or context.compute.batch_loss is not None):
            try_forward_pass(context, groups, step)
        context.events.step = step
        fault_points.reach("before forward", step)
        with self._memory.of_step(step):
            result = self.records.observe(self.strategy, step, groups) or self.strategy.step(step, groups)
            self.records.chain(self.strategy, self.progress, step, result)
        self.loads_ahead = True
        return result

    def _repeat_lost_steps(self, stop: int) -> None:
        """After a return to a checkpoint, repeat the steps before ``stop`` that the script has already taken."""
        while self.progress.to_repeat(stop):
            step, notice = self.progress.steps, 0
            if step not in self.progress.left_out:
                self.activity.begin("repeating lost steps")
                begin = time.perf_counter()
                result = self._run_step(step, self.context.feed.load(step, self.strategy.groups(step)))
                self.progress.result, notice = result, result.notice
                self.context.loop.end_step(step)
                self.records.add(step, result, time.perf_counter() - begin, again=True)
            self.progress.steps = step + 1
            self._settle(step + 1)  # after a loss, others continue from here or from an earlier step, and save nothing
            if self._checkpointer.due(step + 1) and not self._script.is_ahead(step + 1):
                self.strategy.synchronize(step + 1)
                self._begin_save()
            self._follow(notice)

    def make(
        self,
        kind: str,
        doing: str,
        act: Callable[[Call], tuple[Any, int]],
        then: Callable[[Call], None] = lambda _: None,
        calls: CallResults | None = None,
    ) -> Any:
        """Run a collective call of the script and return its result.

        A worker that joined later, or a resumed run, returns the stored result of the call at this position.

        Args:
            kind: kind of the call, from ``training.progress``.
            act: function that makes the call after all workers have reached it. Returns the result and the largest
                notice of any worker.
            then: function that is called when the result is known, even if it was stored. Defaults to no action.
            calls: store of the results. Defaults to the progress.
        """
        self.check_open()

        def make() -> Any:
            while number >= len((calls or self.progress).results(kind, call)):
                self._meet(doing)
                result, notice = act(call)
                (calls or self.progress).add_result(kind, call, result)
                if notice >= LEAVING and self.strategy.divided is not None:
                    self.strategy.hand_on(self.progress.steps)
                self._follow(notice)
            then(call)
            self.activity.begin("in the script")
            return (calls or self.progress).results(kind, call)[number]

        with self.position.counting(kind) as (call, number):
            return self._together(make)

    def synchronize(self) -> None:
        """Bring all workers to the same state. All workers call this at the same step.

        Raises:
            DisagreementError: the states differ, which is checked only with ``exact``.
        """
        self._together(self._synchronize)
        self.activity.begin("in the script")

    def _synchronize(self) -> None:
        steps = self.position.asked
        if steps < self.progress.repeat_until:  # other workers are repeating steps up to repeat_until
            return
        self._meet("synchronizing")
        if self.progress.compared >= steps:  # the other workers have already passed this position
            return
        if self.context.settings.exact:
            compare(self.context, "synchronizing")
        self.progress.compared = steps
        hash_shares(self.strategy, self.progress)

    def _meet(self, doing: str) -> None:
        """Bring this worker to the position of its script and synchronize with all others. Run in :meth:`_together`."""
        self.activity.begin(doing)
        self._repeat_lost_steps(self.position.steps)
        self.strategy.synchronize(self.progress.steps)

    def save(self) -> Path | str:
        """Save a checkpoint of the current state, wait for it, and return its location. All workers call this."""
        self.position.check_outermost("session.save")
        place = self._together(self._synchronize_and_save)
        self.position.save(self.progress.steps)
        self.activity.begin("in the script")
        return place

    def _synchronize_and_save(self) -> Path | str:
        self._synchronize()
        check_saving(self.strategy)
        self.activity.begin("saving a checkpoint", busy=True)
        return self._checkpointer.save(self._state, self.progress.steps, together=self._recovery is not None)

    def _begin_save(self) -> None:
        """Start a background save. The workers must be synchronized."""
        self.activity.begin("saving a checkpoint", busy=True)
        self._checkpointer.begin_save(self._state, self.progress.steps)
        self.activity.begin("in the script")

    def _follow(self, notice: int) -> None:
        """Act on the notice of a step: continue, re-form, or save and stop."""
        waits = self.progress.steps < self.progress.repeat_until  # the registered values are those of a later step
        waits |= self.context.loop.lacks_copies or self.progress.point not in (None, self.progress.steps)
        action = decide(0 if self.strategy.why_unsaved else notice, self._recovery is not None, waits)
        if action is Action.RE_FORM:
            assert self._recovery is not None
            with self.context.loop.not_watched():
                self._recovery.prepare_to_leave(self.progress.steps)
                self._re_form(planned=True)
        elif action is Action.SAVE_AND_STOP:
            world, place = self.context.world, self.save()
            if world.rank == 0:
                _log.warning("preempted: the state after step %d is in %s", self.progress.steps - 1, place)
            world.gather(None, "leaving")  # no worker exits before the checkpoint is complete
            self.context.events.mark("departure", code=PREEMPTED, reason="preempted")
            raise SystemExit(PREEMPTED)

    def close(self) -> None:
        """Close this loop after all workers have reached this point, because the script starts another session."""
        world = self.context.world
        self.context.loop.forward_values.end()
        self.context.loop.outside.end()
        with contextlib.suppress(WorkerLost):
            self.strategy.synchronize(self.progress.steps)
            world.gather(None, "start")
        self.strategy.close()
        self.context.end()
        self._recovery = None  # with the states that it keeps in memory
        world.end_servers()
        if world.coordinator is not None:
            self._formation.leave()
            world.coordinator.report(dict)  # stops heartbeats; the next session has its own client
        self._closed = world.coordinator is not None or world.size > 1
        if self._closed:
            self.context.events.close()

    def check_open(self) -> None:
        """Check that this session is still open."""
        if self._closed:
            raise ConfigError(
                "This session ended when the script started the next one: on several workers they train one after "
                "the other. Put models that are trained in turn into one module, with one session."
            )

    def _together(self, act: Callable[[], _T]) -> _T:
        """Run a collective action, and repeat it with the remaining workers if one is lost during it."""
        with self.context.loop.not_watched():
            return self._try_until_done(act)

    def _try_until_done(self, act: Callable[[], _T]) -> _T:
        while True:
            try:
                return act()
            except WorkerLost as lost:
                if self._recovery is None:
                    raise
                traceback.clear_frames(lost.__traceback__)  # else they keep the graph, and its views of the weights
                self._re_form(lost=lost)

    def _re_form(self, planned: bool = False, lost: WorkerLost | None = None) -> None:
        """Close the strategy, join the next membership, and set up the strategy for its workers."""
        assert self._recovery is not None
        self._notice = 0  # the notice concerned the previous membership
        while True:
            ended = self.context.world.worker_ids(lost.ranks) if lost is not None else []
            self.activity.begin(RE_FORMING)
            if self._strategy_ready:
                self._strategy_ready = False
                self.progress.owned, self.progress.undecided = self.strategy.close(), self.strategy.undecided
                if self.progress.owned == frozenset():  # interrupted in an update: others' schedules are right
                    self.progress.tie_break = 0
                self.context.compute.buffers.reset()
            self._take_over(self._recovery.re_form(self._progress, planned, ended))
            try:
                self._set_up_strategy()
                hash_shares(self.strategy, self.progress)
                able = self.progress.steps >= self.progress.repeat_until and not self.context.loop.lacks_copies
                self._checkpointer.repeat_save(self._state, self.progress.steps, lost is not None, able)
                return
            except WorkerLost as again:
                planned, lost = False, again

    def _take_over(self, progress: Progress) -> None:
        self._progress = progress
        self._script.follow(progress)

    def _set_up_strategy(self) -> None:
        world = self.context.world
        trained = requires_grad_flags(self.context.update.parameters.values())
        with trained.set_to((True,) * len(self.context.update.parameters)):  # each may be trained at some later step
            self._memory.plan(self.progress.steps)
            self.strategy = self._build(self.context)
        self.loads_ahead = False  # the first step may change how the strategy divides a share
        able = capabilities_here(self.context)
        if not (able.replicated or able.cuts_model or able.divides_state) and world.coordinator is not None:
            self.progress.tie_break = world.coordinator.number + 1
        self._strategy_ready = True
        self.context.loop.refresh()

    def _await_process_group(self) -> None:
        """Wait for torch's process group, which the script may use as soon as ``start`` returns."""
        if self.context.world.generation == 0:
            self.context.world.await_process_group()
