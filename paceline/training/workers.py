"""The workers as one of them sees them: how they come together, and what follows when they change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from paceline import fault_points
from paceline.agreement import check
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.training_state import TrainingState
from paceline.errors import WorkerLost
from paceline.partition.flags import requires_grad_flags
from paceline.recovery.activity import RE_FORMING, Activity
from paceline.recovery.progress import Progress
from paceline.recovery.recovery import Recovery
from paceline.step.job import Job
from paceline.strategies.base import Strategy
from paceline.strategies.registry import build, capabilities
from paceline.training.initial import load_initial
from paceline.training.script_state import ScriptState

_T = TypeVar("_T")


class Workers:
    """The present workers, the strategy with which they train, and the progress of this one.

    Args:
        job: what is trained; its workers have not met yet.
        facts: on which all workers must agree.
        state: of the training.
        checkpointer: saves and loads checkpoints.
        resume: the checkpoint to start from, if any.
        script: what the script keeps.

    Attributes:
        strategy: of the present workers.
        activity: what this worker does, for hang detection.
        loads_ahead: whether the batches after the next one may be loaded already.
        closed: whether this session has ended, as another one follows.
    """

    strategy: Strategy

    def __init__(
        self,
        job: Job,
        facts: dict[str, object],
        state: TrainingState,
        checkpointer: Checkpointer,
        resume: str | None,
        script: ScriptState,
    ) -> None:
        self._job = job
        self._facts = facts
        self._checkpointer = checkpointer
        self._state = state
        self._resume = resume
        self._progress: Progress | None = None
        script.history = lambda: {} if self._progress is None else self._progress.history()
        self._strategy_ready = False
        self.activity = Activity(job.world)
        self.loads_ahead = False
        self.closed = False
        fault_points.arm(lambda: -1 if self._progress is None else job.world.rank)
        coordinator = job.world.coordinator
        self._recovery: Recovery | None = None
        if coordinator is None:
            job.world.rendezvous()
            self._progress = self._begin()
            self._set_up_strategy()
        else:
            self._recovery = Recovery(job, coordinator, state, checkpointer, self._begin)
            self._recovery.register(
                facts, lambda: self.activity.status(0 if self._progress is None else self._progress.steps)
            )
            self._re_form()
            self._await_process_group()

    @property
    def progress(self) -> Progress:
        """How far this worker is: ahead of the script once it has received the state of another one."""
        assert self._progress is not None
        return self._progress

    def retry(self, act: Callable[[], _T]) -> _T:
        """Do what all workers do together; again with those that are left if one is lost meanwhile."""
        with self._job.loop.not_watched():
            return self.take(act)

    def take(self, act: Callable[[], _T]) -> _T:
        """Do so for a step, around which the caller looks for what the loop changes."""
        while True:
            try:
                return act()
            except WorkerLost as lost:
                if self._recovery is None:
                    raise
                self._re_form(lost=lost)

    def change(self) -> bool:
        """Re-form, as all agreed at the end of a step; returns whether this run can."""
        if self._recovery is None:
            return False
        with self._job.loop.not_watched():
            self._recovery.prepare_to_leave()
            self._re_form(planned=True)
        return True

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
        self.closed = world.coordinator is not None or world.size > 1

    def _begin(self) -> Progress:
        """Compare what is to be trained, and load the checkpoint to go on from, if any: nobody has a state yet."""
        check(self._job.world, self._facts)
        # In a later generation all that had a state are lost.
        again = self._resume is None and self._job.world.generation > 0 and self._checkpointer.enabled
        steps = self._checkpointer.resume(self._state, "auto" if again else self._resume)
        if self._job.settings.weights.path is not None and self._checkpointer.last is None:
            load_initial(self._job)
        return Progress.resumed(steps, self._state.loaded_script if steps else {})

    def _set_up_strategy(self) -> None:
        world = self._job.world
        trained = requires_grad_flags(self._job.update.parameters.values())
        with trained.set_to((True,) * len(self._job.update.parameters)):  # as each may be, at some step
            self.strategy = build(self._job)
        self.loads_ahead = False  # its first step may change how it cuts a share
        able = capabilities(self._job.settings, world.size)
        if not able.replicated and not able.cuts_model and world.coordinator is not None:
            self.progress.tie_break = world.coordinator.number + 1
        self._strategy_ready = True
        self._job.loop.refresh()

    def _await_process_group(self) -> None:
        """Wait for torch's process group, which the script may use as soon as it goes on."""
        while self._job.world.generation == 0:
            try:
                self._job.world.await_process_group()
                return
            except WorkerLost as lost:
                self._re_form(lost=lost)

    def _re_form(self, planned: bool = False, lost: WorkerLost | None = None) -> None:
        """Drop what is under way, and go on with the next members."""
        assert self._recovery is not None
        while True:
            ended = self._job.world.worker_ids(lost.ranks) if lost is not None else []
            self.activity.begin(RE_FORMING)
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
