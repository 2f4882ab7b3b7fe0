"""What a step tells the script, and what ``paceline profile`` is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.step.job import Batch, Job, StepResult


@dataclass(frozen=True)
class Report:
    """What one step did; the same on every worker but for the times.

    With an asynchronous strategy the result is that of the newest step that this worker knows of (it waits for the
    first), with local SGD, between two averages, that of this worker's share, and with PipeDream that of what came back
    to this worker.

    Attributes:
        step: the number of the step, from 0.
        loss: the mean loss over the whole batch, before the update.
        samples: samples seen since the beginning of training, this step's included.
        seconds: time for loading the batch and for the step.
        samples_per_second: samples of this batch, over all workers, per second.
        gradient_norm: the global 2-norm of the mean gradient, before clipping.
        learning_rate: what the update used (first parameter group).
        applied: false if no update was made, because the loss, or a gradient in float16, was not finite.
        metrics: the means over the whole batch of the metrics that ``forward`` or ``loss`` returns, by name.
        notes: what was applied that the script did not spell out, such as a scaled learning rate, and why.
    """

    step: int
    loss: float
    samples: int
    seconds: float
    samples_per_second: float
    gradient_norm: float
    learning_rate: float
    applied: bool
    metrics: dict[str, float]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, job: Job, batch: Batch, result: StepResult, seconds: float, notes: tuple[str, ...]) -> Report:
        """What is told of the result of a step."""
        return cls(
            step=batch.step,
            loss=result.loss,
            samples=job.order.samples_before(batch.step + 1),
            seconds=seconds,
            samples_per_second=batch.samples / seconds,
            gradient_norm=float(result.norm),
            learning_rate=result.learning_rate,
            applied=result.applied,
            metrics=dict(result.metrics),
            notes=(*notes, *job.learned.warnings, *job.warnings),
        )


def report_profile(job: Job, loss: Callable[[Any, Any], Any] | None, path: Path) -> None:
    """Write what the model costs, for ``paceline profile``."""
    from paceline.planning import costs
    from paceline.planning.profile import profile  # what traces models takes seconds to import

    found = profile(job, loss)
    if job.world.rank == 0:
        costs.write(found, path)
