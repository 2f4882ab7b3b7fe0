"""What a script can ask of training: batches, steps, evaluations, checkpoints.

With a coordinator, a lost worker does not end training: what was under way is dropped, the workers re-form
(``workers.py``, ``recovery.recovery``), and it is done again with other shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.training_state import TrainingState
from paceline.errors import ConfigError
from paceline.evaluation.measure import Measure
from paceline.recovery.progress import Call, Progress
from paceline.step.job import Batch, Job, StepResult
from paceline.strategies.base import Strategy
from paceline.training import one_worker
from paceline.training.evaluations import Evaluations
from paceline.training.exports import Exports
from paceline.training.script_state import ScriptState
from paceline.training.steps import Steps
from paceline.training.workers import Workers


class TrainingLoop:
    """Takes the steps and evaluations that the script asks for.

    Args:
        job: what is trained; its workers have not met yet.
        facts: on which all workers must agree.
        state: of the training.
        checkpointer: saves and loads checkpoints.
        resume: the checkpoint to start from, if any.
        script: what the script keeps.

    Attributes:
        exports: the weights for the script.
    """

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
        self._workers = Workers(job, facts, state, checkpointer, resume, script)
        self._steps = Steps(job, self._workers, state, checkpointer, script)
        self.exports = Exports(job, self._workers, self._steps)
        self._evaluations = Evaluations(job, self._workers, self._steps)

    @property
    def position(self) -> int:
        """How many steps the script has come past."""
        return self._steps.position.steps

    @property
    def strategy(self) -> Strategy:
        """The strategy of the present workers."""
        return self._workers.strategy

    @property
    def progress(self) -> Progress:
        """How far this worker is: ahead of the position once it has received the state of another one."""
        return self._workers.progress

    @property
    def repeats(self) -> bool:
        """Whether the script comes past what the run has done before it: this worker joined later, or has resumed."""
        return self._steps.position.asked < self.progress.received

    def epochs(self, count: int) -> Iterator[int]:
        """Iterate over the epochs below ``count`` that are not done."""
        return self._steps.position.epochs(count)

    def batches(self, count: int | None, epochs: bool = False) -> Iterator[Batch]:
        """Iterate over the batches of the next ``count`` steps or epochs; the iterator before ends.

        Without a count those of the present epoch.
        """
        return self._steps.position.batches(count, epochs, self._steps.last)

    def step(self, batch: Batch, phase: str = "") -> tuple[StepResult, float]:
        """Take a step; return its result, and the seconds it took, the loading of the batch included.

        ``phase`` is the name of an optimizer, if a batch has several phases; then the result is that of this one.

        Raises:
            WorkerLost: there are not enough workers left.
            SystemExit: this worker's part is over, or the run's.
        """
        self._check_open()
        return self._steps.step(batch, phase)

    def evaluate(self, measure: Measure, data: Any) -> Any:
        """Return the result of a measure; see :meth:`Evaluations.evaluate`."""
        self._check_open()
        return self._evaluations.evaluate(measure, data)

    def predict(self, measure: Measure, data: Any, everywhere: bool) -> Any:
        """Return outputs for all samples; see :meth:`Evaluations.predict`."""
        self._check_open()
        return self._evaluations.predict(measure, data, everywhere)

    def once(self, act: Callable[[], Any]) -> Any:
        """Return what ``act`` gives on rank 0, while all others wait; see :meth:`paceline.Session.once`."""
        self._check_open()
        call, number = self._steps.position.count("once")
        value = self._workers.retry(lambda: self._once(call, number, act))
        self._steps.position.move_to(self.position)
        return value

    def _once(self, call: Call, number: int, act: Callable[[], Any]) -> Any:
        workers = self._workers
        while number >= len(workers.progress.once.get(call, ())):
            self._steps.meet("in session.once")
            workers.activity.begin("in session.once", busy=True)
            value, notice = one_worker.run(self._job.world, act)
            workers.progress.once.setdefault(call, []).append(value)
            self._steps.follow(notice)
        workers.activity.begin("in the script")
        return workers.progress.once[call][number]

    def synchronize(self) -> None:
        """Bring all workers to the same state; all call this at the same step.

        Raises:
            DisagreementError: with ``exact``, their states are not the same.
            WorkerLost: there are not enough workers left.
        """
        self._steps.synchronize()

    def save(self) -> Path | str:
        """Save the state after the steps done and wait for it; all call this together."""
        return self._steps.save()

    def close(self) -> None:
        """Leave the others, once all have come so far: another session follows in this process."""
        self._workers.close()

    def _check_open(self) -> None:
        if self._workers.closed:
            raise ConfigError(
                "This session ended when the script started the next one: on several workers they train one after "
                "the other. Put models that are trained in turns into one module, with one session."
            )
