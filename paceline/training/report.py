"""Reports: the result of a step for the script, and layer costs for ``paceline profile``."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path

from paceline.step.context import Batch, StepResult, TrainingContext


@dataclass(frozen=True)
class Report:
    """Result of one step, equal on all workers except for the times.

    Asynchronous strategies report the newest step that this worker knows of, and wait for the first step. Between two
    averages, local SGD reports this worker's share of the batch. PipeDream reports the microbatches whose results have
    returned to this worker.

    Attributes:
        step: step number, from 0.
        loss: mean loss over the whole batch, before the update.
        samples: number of samples since the beginning of training, including this step.
        seconds: time to load the batch and run the step, in seconds.
        samples_per_second: throughput of this step over all workers. If workers compute different steps at the same
            time, that of the newest eight steps of each worker, or of ``local.every`` steps with ``local.uneven``.
        gradient_norm: global 2-norm of the mean gradient, before clipping.
        learning_rate: learning rate of the update, from the first parameter group.
        applied: whether the update was applied. False if the loss, or a gradient in float16, was not finite.
        metrics: means over the whole batch of the metrics that ``forward`` or ``loss`` returns, by name.
        notes: messages on behavior that the script did not request explicitly, such as a scaled learning rate.
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


class Throughput:
    """Throughput over all workers, from the steps that this worker has taken."""

    def __init__(self) -> None:
        self.samples_per_second = 0.0  # 0 before the first step
        self._steps: deque[tuple[int, float]] = deque()  # samples and seconds of the newest steps

    def add(self, samples: int, seconds: float, over: int) -> None:
        """Add a step. ``over`` is the number of newest steps over which the throughput is averaged.

        >>> throughput = Throughput()
        >>> for seconds in (2.0, 0.0, 2.0, 0.0):  # another worker computes every second step
        ...     throughput.add(32, seconds, over=4)
        >>> throughput.samples_per_second
        32.0
        """
        self._steps = deque([*self._steps, (samples, seconds)], maxlen=over)
        self.samples_per_second = sum(one for one, _ in self._steps) / sum(one for _, one in self._steps)


def report_of(
    context: TrainingContext,
    batch: Batch,
    result: StepResult,
    seconds: float,
    throughput: Throughput,
    notes: tuple[str, ...],
) -> Report:
    """Build the report of a step."""
    return Report(
        step=batch.step,
        loss=result.loss,
        samples=context.order.samples_before(batch.step + 1),
        seconds=seconds,
        samples_per_second=throughput.samples_per_second,
        gradient_norm=float(result.norm),
        learning_rate=result.learning_rate,
        applied=result.applied,
        metrics=dict(result.metrics),
        notes=(*notes, *context.probe_results.warnings, *context.warnings),
    )


def report_profile(context: TrainingContext, path: Path) -> None:
    """Measure the costs of the model's layers and write them to a file on rank 0, for ``paceline profile``."""
    from paceline.planning import costs
    from paceline.planning.profile import profile  # takes seconds to import

    found = profile(context)
    if context.world.rank == 0:
        costs.write(found, path)
