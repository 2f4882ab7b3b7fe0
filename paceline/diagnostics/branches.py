"""Branch of ``paceline tune`` in a worker: it varies the learning rate, and ends after its steps or at divergence."""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.diagnostics.replay.observer import end
from paceline.environments import env
from paceline.errors import ConfigError, NonFiniteLoss
from paceline.step.context import StepResult, TrainingContext
from paceline.strategies.registry import capabilities

_DIVERGED = 3.0  # a branch diverges if its loss exceeds the first loss by this many times that loss or the largest fall


class RunningBranch:
    """Branch that this process trains.

    Raises:
        ConfigError: the learning rate of the script cannot be varied, or the loss is not of the whole batch.
    """

    def __init__(self, asked: env.Branch, context: TrainingContext) -> None:
        self._asked, self._context = asked, context
        self._first = self._least = math.nan
        update, settings = context.update, context.settings
        able = capabilities(settings, 2)
        if able.replicas or not (able.exact or able.fixed_point):
            raise ConfigError(
                f"paceline tune compares losses of whole batches, and strategy {settings.strategy!r} with these "
                f"settings has losses of single workers. Tune with --set strategy=allreduce."
            )
        if context.phases:
            raise ConfigError("paceline tune varies one learning rate, and this script has a loss for each optimizer.")
        for group in update.optimizer.param_groups:
            rate = group.setdefault("initial_lr", group["lr"])
            if rate is None or not 0 < float(rate) < math.inf:
                raise ConfigError(
                    f"The first learning rate of {update.kind} is {rate}, so there is none to vary: give the optimizer "
                    f"a rate above 0. A schedule has no effect in paceline tune."
                )
        update.ramp = asked.factor
        rate = float(update.optimizer.param_groups[0]["initial_lr"])
        about = {"optimizer": update.kind, "rate": rate, "batch": context.order.batch}
        about["per_worker"] = settings.batch_per_worker is not None
        context.events.mark("branch", **about, microbatches=context.order.microbatches)

    def take(self, step: int, take: Callable[[], StepResult]) -> StepResult:
        """Take a step. End this worker if its loss is not finite: all workers have the same loss."""
        try:
            return take()
        except NonFiniteLoss:
            self._end(step, diverged=True)
            raise

    def after(self, step: int, loss: float) -> None:
        """End this worker if the step is the last one, or the loss has grown too much."""
        if step == 0:
            self._first = self._least = loss
        self._least = min(self._least, loss)
        most = self._first + _DIVERGED * max(abs(self._first), self._first - self._least)
        if not loss <= most:
            self._end(step, diverged=True)
        elif step + 1 >= self._asked.steps:
            self._end(step, diverged=False)

    def _end(self, step: int, diverged: bool) -> None:
        self._context.events.mark("branch-end", step=step, diverged=diverged)
        end(self._context)
