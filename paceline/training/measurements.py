"""What a session measures: metrics over a data set, and predictions for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from paceline.errors import InputError
from paceline.evaluation.metrics import Metrics, numbers_in
from paceline.evaluation.predictions import Predictions
from paceline.step.job import Job
from paceline.trackers.tracking import Tracking
from paceline.training.loop import TrainingLoop


class Measurements:
    """The methods of a session that measure the model."""

    _job: Job
    _loop: TrainingLoop
    _tracking: Tracking
    _by_loss: bool

    def evaluate(
        self,
        data: Any,
        metric: Callable[..., Any] | Mapping[str, Any] | Any = None,
        *,
        forward: Callable[[nn.Module, Any], Any] | None = None,
    ) -> Any:
        """The mean of a metric over a data set, or several; every worker must call it, and all get the same values.

        Args:
            data: a map-style data set like the one trained on, or a stream. Each sample is visited exactly once.
            metric: ``metric(output, target)``, or ``metric(model, microbatch)`` in a session with ``forward``: a
                number, the mean over the samples given, or a pair (sum, count). Or an object with ``update(output,
                target)``, ``compute()`` and ``reset()``, as those of torchmetrics. None: the loss. Several: a
                dictionary of these.
            forward: ``forward(model, microbatch)`` returns what metrics are called with, such as (output, target).

        Returns:
            the mean, or what the object computes; of a dictionary one with the same keys.

        Raises:
            InputError: the data set is empty, a metric returns no number, or it changes a weight of the model.
            DisagreementError: the weights are not the same on all workers (only looked for with ``exact``), or the
                samples of a stream.
            WorkerLost: another worker went away or stayed silent.
        """
        metrics = Metrics(self._job, metric, forward, by_loss=self._by_loss)
        value = self._loop.evaluate(metrics, data)
        self._tracking.evaluated(metric, value if isinstance(value, float) else numbers_in(value, ""), self._last_step)
        return value

    def predict(
        self, data: Any, forward: Callable[[nn.Module, Any], Any] | None = None, *, everywhere: bool = True
    ) -> Any:
        """The outputs of the model for a data set, in the order of its samples; every worker must call it.

        Args:
            data: see :meth:`evaluate`.
            forward: ``forward(model, microbatch)`` returns tensors whose first dimension is that of the samples, lists
                with one entry for each, or tuples and dictionaries of these. None: the output of the model, in a
                session with ``loss``.
            everywhere: false: rank 0 gets them, and the other ranks None.

        Returns:
            the outputs of all microbatches as one, in host memory.

        Raises:
            InputError: the data set is empty, or the outputs cannot be gathered.
            DisagreementError, WorkerLost: see :meth:`evaluate`.
        """
        if forward is None and not self._by_loss:
            raise InputError(
                "In a session with forward= nothing says what the model's output is: give predict(data, forward), a "
                "function of (model, microbatch) that returns it."
            )
        return self._loop.predict(Predictions(forward), data, everywhere)

    @property
    def _last_step(self) -> int:
        """The step to which what the script records now belongs."""
        return max(self._loop.position - 1, 0)
