"""Evaluations and predictions: all workers make them together, and again with those that are left if one is lost.

A result of ``evaluate`` is kept for resumed runs and for workers that come past it later. Predictions are too large for
that: whoever comes past them later computes them alone.
"""

from __future__ import annotations

import logging
from typing import Any

from paceline.evaluation.measure import Measure, evaluate, evaluate_alone
from paceline.recovery.progress import Call
from paceline.step.job import Job
from paceline.training.steps import Steps
from paceline.training.workers import Workers

_log = logging.getLogger("paceline")
_PAST = "predict: the run has gone on after this call, which follows step %d: the model of step %d predicts instead."


class Evaluations:
    """Measures the model after the steps done.

    Args:
        job: what is trained.
        workers: with whom.
        steps: brings the workers to the same state.
    """

    def __init__(self, job: Job, workers: Workers, steps: Steps) -> None:
        self._job = job
        self._workers = workers
        self._steps = steps

    def evaluate(self, measure: Measure, data: Any) -> Any:
        """The result of a measure; a worker that joined later gets the results of evaluations before that.

        Raises:
            InputError, DisagreementError: see :func:`paceline.evaluation.measure.evaluate`.
            WorkerLost: there are not enough workers left.
        """
        position = self._steps.position
        call, number = position.count("evaluate")
        with self._job.events.span("evaluate", step=position.steps):
            value = self._workers.retry(lambda: self._evaluate(call, number, measure, data))
        position.move_to(position.steps)
        return value

    def _evaluate(self, call: Call, number: int, measure: Measure, data: Any) -> Any:
        workers = self._workers
        while number >= len(workers.progress.evaluations.get(call, ())):
            self._steps.meet("evaluating")
            self._warn_of_past(
                "evaluate: the checkpoint has no result of this call after step %d, as the script was another one "
                "then, or it is of an older version: the model of step %d is evaluated instead.",
                call,
            )
            value, notice = evaluate(self._job, workers.progress.steps, measure, data)
            workers.progress.evaluations.setdefault(call, []).append(value)
            self._steps.follow(notice)
        workers.activity.begin("in the script")
        return workers.progress.evaluations[call][number]

    def predict(self, measure: Measure, data: Any, everywhere: bool) -> Any:
        """The outputs for all samples; on other ranks than 0 None, unless ``everywhere``.

        Raises:
            InputError, DisagreementError, WorkerLost: as :meth:`evaluate`.
        """
        position, found = self._steps.position, _Found()
        call, number = position.count("predict")
        with self._job.events.span("predict", step=position.steps):
            self._workers.retry(lambda: self._predict(call, number, measure, data, everywhere, found))
        position.move_to(position.steps)
        return found.value

    def _predict(self, call: Call, number: int, measure: Measure, data: Any, everywhere: bool, found: _Found) -> None:
        workers, job = self._workers, self._job
        while number >= workers.progress.predictions.get(call, 0):
            self._steps.meet("predicting")
            self._warn_of_past(_PAST, call)
            wanted = everywhere or job.world.rank == 0
            result = evaluate(job, workers.progress.steps, measure, data, "predict", everywhere=everywhere)
            found.value, found.known = result[0], wanted
            workers.progress.predictions[call] = workers.progress.predictions.get(call, 0) + 1
            self._steps.follow(result[1])
        if not found.known and (everywhere or job.world.rank == 0):  # it has come later, or has been another rank
            self._warn_of_past(_PAST, call)
            workers.activity.begin("predicting", busy=True)
            found.value, found.known = evaluate_alone(job, measure, data, "predict"), True
        workers.activity.begin("in the script")

    def _warn_of_past(self, text: str, call: Call) -> None:
        progress = self._workers.progress
        if call[0] < progress.received and self._job.world.rank == 0:
            _log.warning(text, call[0] - 1, progress.steps - 1)


class _Found:
    """Predictions, as soon as they are known."""

    value: Any = None
    known = False
