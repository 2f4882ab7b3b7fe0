"""The course of training as one worker takes it: from step to step, through losses, joins and notices.

With a line to the roster a lost worker does not end it: what was under way is dropped, the workers gather anew
(``recovery.recovery``), and it is done again with other shares.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import platform
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any, TypeVar

import torch

from paceline import env, evaluation, fault_points
from paceline.agreement import check
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.training_state import TrainingState
from paceline.comm.rendezvous.coordinator_client import CoordinatorClient
from paceline.comm.world import LEAVING
from paceline.coordinator.types import Departure
from paceline.data.feed import Piece
from paceline.errors import PREEMPTED, ConfigError, WorkerLost
from paceline.recovery.recovery import Progress, Recovery
from paceline.step.job import Job, StepResult
from paceline.strategies.base import Strategy
from paceline.strategies.registry import build, capabilities, worker_counts

_T = TypeVar("_T")
_log = logging.getLogger("paceline")
_OWN_MACHINE = 1000
"""Workers of the machine that holds the roster have smaller numbers."""


def record_step(job: Job, step: int, outcome: StepResult, seconds: float, waited: float) -> None:
    """Record a step that this worker did; ``waited``: seconds of it for the data."""
    samples = job.order.samples_of(step)
    job.events.mark(
        "step",
        step=step,
        seconds=seconds,
        waited=waited,
        loss=outcome.loss,
        samples=samples,
        samples_per_second=samples / seconds,
        gradient_norm=float(outcome.norm),
        learning_rate=outcome.learning_rate,
    )


class TrainingLoop:
    """Takes the steps and evaluations that the script asks for.

    Args:
        job: what is trained; its workers have not met yet.
        facts: on which all workers must agree.
        state: of the training.
        checkpointer: of checkpoints.
        resume: the checkpoint to start from, if any.

    Attributes:
        views: how often the workers have gathered; pieces loaded before are not this worker's any more.
        strategy: the one at work.
        loads_ahead: whether its pieces can be asked for ahead: its first step may change how it cuts a share.
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
        self._asked = 0, 0
        self._reached = 0
        self._laid_out = False
        self._cold: dict[Any, Any] | None = None
        """Of a spare that has made itself warm: the state of the optimizer before."""
        self._doing = "starting", time.monotonic(), False
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._closed = False
        self.views = 0
        fault_points.arm(lambda: job.world.rank if self.views else -1)
        coordinator = job.world.coordinator
        self._recovery: Recovery | None = None
        if coordinator is None:
            job.world.rendezvous()
            self._alone = Progress(self._begin())
            self._settle_in()
        else:
            self._recovery = Recovery(job, coordinator, state, checkpointer, self._begin)
            self._line_up(coordinator)
            self._gather()
            self._await_group()

    @property
    def standing(self) -> Progress:
        """How far this worker is."""
        standing = self._alone if self._recovery is None else self._recovery.standing
        assert standing is not None
        return standing

    @property
    def taken(self) -> int:
        """How many steps others had done when this worker last took their state; 0 if it never has.

        They may be in the middle of what the script does with the last one of these.
        """
        return 0 if self._recovery is None else self._recovery.taken

    def _begin(self) -> int:
        """Nobody has a state: agree, and load the checkpoint if there is one to go on from."""
        if self._cold is not None:
            self._job.update.optimizer.state.clear()
            self._job.update.optimizer.state.update(self._cold)
        check(self._job.world, self._facts)
        resume = self._resume
        if resume is None and self._job.world.generation > 0 and self._checkpointer.enabled:
            resume = "auto"  # all that had a state are lost
        return self._checkpointer.resume(self._state, resume)

    def _settle_in(self) -> None:
        self.strategy = build(self._job)
        self.loads_ahead = False
        able = capabilities(self._job.settings, self._job.world.size)
        if not able.replicated and not able.cuts_model and self._job.world.coordinator is not None:
            self.standing.apart = self._job.world.coordinator.number + 1
        self._laid_out = True
        self._cold = None
        self.views += 1

    def _line_up(self, coordinator: CoordinatorClient) -> None:
        """Tell the roster that this worker is there; a spare makes itself warm first."""
        launched, world = env.launch_info(), self._job.world
        assert launched is not None
        if launched.spare:
            self._warm_up()
        coordinator.place = self._place
        about = {
            "host": platform.node(),
            "pid": os.getpid(),
            "address": coordinator.address,
            "port": world.open_store(coordinator.address),
        }
        facts = {key: value for key, value in self._facts.items() if not key.startswith("initial")}
        fits = worker_counts(self._job.settings, self._job.order.microbatches, launched.largest)
        coordinator.greet(about, facts, self._job.settings.hang_seconds, launched.worker < _OWN_MACHINE, fits)

    def _warm_up(self) -> None:
        """Take a step for nothing, so that the others need not wait for what a process does only once."""
        compute, parameters = self._job.compute, self._job.update.parameters
        before = {name: value.detach().clone() for name, value in parameters.items()}
        self._cold = {key: copy.deepcopy(value) for key, value in self._job.update.optimizer.state.items()}
        compute.buffers.begin()
        try:
            (piece,) = self._job.feed.load(0, [range(1)])
            compute.forward_pass(piece, 0).total.backward()
            self._job.update.optimizer.step()
        except Exception as error:  # noqa: BLE001 - what the script's functions use may not be there before start() returns
            _log.info("the standby worker could not take a step for nothing: %s", error)
        compute.buffers.reset()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(before[name])
                parameter.grad = None
        torch.zeros(self._state.snapshot(0).bytes, dtype=torch.uint8)  # the memory stays, for the state to come

    def _gather(self, planned: bool = False, lost: WorkerLost | None = None) -> None:
        """Come into the next view, and go on from there."""
        assert self._recovery is not None
        while True:
            ended = self._job.world.worker_ids(lost.ranks) if lost is not None else []
            parting = self._recovery.gather(self._stop, planned, ended)
            if parting is not None:
                self._end(parting)
            try:
                self._settle_in()
                return
            except WorkerLost as again:  # while they agreed how to go on
                planned, lost = False, again

    def _await_group(self) -> None:
        """The script may use torch's group as soon as it goes on."""
        while self._job.world.generation == 0:
            try:
                self._job.world.await_process_group()
                return
            except WorkerLost as lost:
                self._gather(lost=lost)

    def _stop(self) -> None:
        self.at("gathering anew")
        if self.views:
            fault_points.reach("during recovery", self.standing.steps)
            holds = self.strategy.close()
            if self._laid_out:  # else nobody has moved since all had the whole state
                self.standing.holds = holds
            self._laid_out = False
            self._job.compute.buffers.reset()

    def _end(self, parting: Departure) -> None:
        if parting.code in (0, PREEMPTED):
            raise SystemExit(parting.code)
        raise WorkerLost(f"{parting.reason[:1].upper()}{parting.reason[1:]}.")

    def close(self) -> None:
        """Another session follows in this process: part from the others, once all have come so far."""
        world = self._job.world
        with contextlib.suppress(WorkerLost):
            self.strategy.synchronize(self.standing.steps)
            world.gather(None, "start")
        self.strategy.close()
        if world.coordinator is not None:
            world.leave()
            world.coordinator.place = dict  # the next session has a line of its own
        self._closed = world.coordinator is not None or world.size > 1

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError(
                "This session ended when the script started the next one: on several workers they train one after "
                "the other. Put models that are trained in turns into one module, with one session."
            )

    def at(self, doing: str, busy: bool = False) -> None:
        """Remember what this worker does now; ``busy`` if that may well take long."""
        self._doing = doing, time.monotonic(), busy

    def _place(self) -> dict[str, Any]:
        """What this worker does, for the roll call; called by the thread of the line."""
        doing, since, busy = self._doing
        world = self._job.world
        awaited, asked = world.awaited
        if awaited:
            doing, since = world.doing(), asked
        waits = bool(awaited) or doing == "gathering anew"
        return {
            "step": self.standing.steps if self.views else 0,
            "doing": doing,
            "waits": waits,
            "busy": busy,
            "since": time.monotonic() - since,
            "step_seconds": median(self._step_seconds) if self._step_seconds else None,
        }

    def step(self, step: int, pieces: list[Piece], fed: int) -> StepResult:
        """Take a step; one that others had done before this worker took their state has the outcome of their last one.

        Args:
            step: its number.
            pieces: what this worker computes.
            fed: the number of the view for which they were loaded.

        Raises:
            WorkerLost: there are not enough workers left.
        """
        self._check_open()
        begin = time.perf_counter()
        while step >= self.taken:
            try:
                self._catch_up(step)
                self.standing.left_out.update(range(self.standing.steps, step))
                if fed != self.views:
                    pieces, fed = self._job.feed.load(step, self.strategy.pieces(step)), self.views
                self.at("computing")
                outcome = self._take(step, pieces)
            except WorkerLost as lost:
                if self._recovery is None:
                    raise
                self._gather(lost=lost)
                continue
            self._step_seconds.append(time.perf_counter() - begin)
            self.standing.steps, self.standing.outcome = step + 1, outcome
            self._reached = step + 1
            self.at("in the script")
            return outcome
        known = self.standing.outcome or StepResult(math.nan, math.nan, math.nan, applied=False)
        return replace(known, notice=0)  # the workers have gathered since

    def _take(self, step: int, pieces: list[Piece]) -> StepResult:
        fault_points.reach("before forward", step)
        result = self.strategy.step(step, pieces)
        self.loads_ahead = True
        return result

    def _catch_up(self, step: int) -> None:
        """After going back to a checkpoint: take the steps up to this one again, which the script has seen."""
        standing = self.standing
        while (again := standing.steps) < min(step, standing.again):
            if again not in standing.left_out:
                self.at("taking steps again")
                begin = time.perf_counter()
                pieces = self._job.feed.load(again, self.strategy.pieces(again))
                standing.outcome = self._take(again, pieces)
                record_step(self._job, again, standing.outcome, time.perf_counter() - begin, 0.0)
            standing.steps = again + 1
            if self._checkpointer.due(standing.steps):
                self.strategy.synchronize(standing.steps)
                self._checkpointer.begin_save(self._state, standing.steps)
            self.heed(standing.outcome.notice if standing.outcome else 0)
            standing = self.standing

    def evaluate(self, steps: int, forward: Callable[..., Any], data: Any) -> float:
        """The mean of a metric; a worker that joined later gets the results that there were before.

        Args:
            steps: after how many steps the script asks for it.
            forward: the metric.
            data: what to measure on.

        Raises:
            InputError, DisagreementError: see :func:`paceline.evaluation.evaluate`.
            WorkerLost: there are not enough workers left.
        """
        self._check_open()
        place = self._asked[1] if self._asked[0] == steps else 0
        while place >= len(self.standing.evaluations.get(steps, ())):
            self.at("evaluating")
            try:
                self._catch_up(self._reached)
                self.strategy.synchronize(self.standing.steps)
                value, notice = evaluation.evaluate(self._job, self.standing.steps, forward, data)
            except WorkerLost as lost:
                if self._recovery is None:
                    raise
                self._gather(lost=lost)
                continue
            self.standing.evaluations.setdefault(steps, []).append(value)
            self.heed(notice)
        self._asked = steps, place + 1
        self.at("in the script")
        return self.standing.evaluations[steps][place]

    def settle(self) -> None:
        """Bring all workers to the same state; all call this at the same step.

        Raises:
            WorkerLost: there are not enough workers left.
        """
        while True:
            self.at("settling")
            try:
                self._catch_up(self._reached)
                self.strategy.synchronize(self.standing.steps)
            except WorkerLost as lost:
                if self._recovery is None:
                    raise
                self._gather(lost=lost)
                continue
            self.at("in the script")
            return

    def save(self, keep: Callable[[TrainingState, int], _T]) -> _T:
        """Save the state after the steps done, in the way of the checkpointer that is given; all call this together."""
        self.settle()
        self.at("saving a checkpoint", busy=True)
        kept = keep(self._state, self.standing.steps)
        self.at("in the script")
        return kept

    def heed(self, notice: int) -> None:
        """Do what the workers told each other: gather anew if the world is to change, or stop in good order.

        Raises:
            SystemExit: this worker's part is over, or the run's.
        """
        if not notice:
            return
        if self._recovery is not None:
            self._meet_before_leaving()
            if self._job.world.leaving:
                self._checkpointer.finish()  # another one writes the next checkpoint
            self._gather(planned=True)
        elif notice >= LEAVING:
            place = self.save(self._checkpointer.save)
            if self._job.world.rank == 0:
                _log.warning("preempted: the state after step %d is in %s", self.standing.steps - 1, place)
            self._job.world.gather(None, "leaving")  # nobody ends before the checkpoint is there
            self._job.events.mark("parting", code=PREEMPTED, reason="preempted")
            raise SystemExit(PREEMPTED)

    def _meet_before_leaving(self) -> None:
        """Over the network a connection that is closed may take with it what another worker has yet to read."""
        world = self._job.world
        if world.size > 1 and world.shared_memory is None and not world.alarmed:
            with contextlib.suppress(WorkerLost):
                world.gather(None, "leaving")
