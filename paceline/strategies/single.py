"""Training in one process: the reference to which all other strategies are compared.

::

    for each microbatch m:   forward, backward      the gradient of the sum of its losses
    add them up along the canonical tree, divide by the count, update
"""

from __future__ import annotations

from functools import partial

from torch import nn

from paceline.data.feed import MicrobatchGroup
from paceline.data.order import BatchOrder
from paceline.errors import ConfigError
from paceline.settings import Settings
from paceline.step.commit import commit
from paceline.step.context import StepResult, TrainingContext
from paceline.step.probes.optimizer_probe import check_draws
from paceline.strategies.base import WIRES, Capabilities, Strategy
from paceline.strategies.full_batch import FullBatch


class Single(Strategy):
    """Plain PyTorch training in one process."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._batch = FullBatch(context)

    def groups(self, step: int) -> list[range]:
        return self._batch.groups(step)

    def step(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        parts, buffers = self._batch.gradients(step, groups)
        again = partial(self._batch.again, step, groups)
        result = commit(
            self._context, step, groups, parts, buffers, self._context.world.notice(), self._batch.apply, again
        )
        self._batch.accept()
        check_draws(self._context)
        return result

    def close(self) -> None:
        self._batch.take_gradients()


def capabilities(settings: Settings, workers: int) -> Capabilities:
    """Return the capabilities of training in one process."""
    return Capabilities(fixed_point=True, wires=WIRES, phases=True, batch_losses=True, closures=True, scales_loss=True)


def validate(settings: Settings, model: nn.Module, order: BatchOrder, workers: int, largest: int) -> None:
    """Raise ConfigError if the run may have several workers."""
    if largest > 1:
        raise ConfigError(f"strategy 'single' is for one process, but there may be {largest} workers: use 'allreduce'.")
