"""Training in one process: the reference to which all other strategies are compared.

::

    for each microbatch m:   forward, backward      the gradient of the sum of its losses
    add them up along the canonical tree, divide by the count, update
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from paceline.data.feed import MicrobatchGroup
from paceline.data.order import BatchOrder
from paceline.errors import ConfigError
from paceline.settings import Settings
from paceline.step.commit import commit
from paceline.step.context import StepResult, TrainingContext
from paceline.step.divided.optimizer_state import DividedOptimizerState
from paceline.step.probes.optimizer_probe import check_draws
from paceline.strategies.base import WHOLE_WIRES, Capabilities, Strategy
from paceline.strategies.full_batch import FullBatch
from paceline.system.wires import ADAPTIVE, PARTIAL_WIRES


class Single(Strategy):
    """Plain PyTorch training in one process."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._batch = FullBatch(context)
        self._memory, self._notice = self._batch.memory, 0

    def groups(self, step: int) -> list[range]:
        return self._batch.groups(step)

    def step(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        parts, buffers = self._batch.gradients(step, groups)
        again = partial(self._batch.again, step, groups)
        result = commit(
            self._context, step, groups, parts, buffers, self._context.world.notice(), self._batch.apply, again
        )
        self._batch.accept(result.applied)
        self._notice = result.notice
        check_draws(self._context)
        return result

    @property
    def divided(self) -> DividedOptimizerState | None:
        return None if self._memory is None else self._memory.divided

    def point(self, steps: int) -> Mapping[str, torch.Tensor] | None:
        return None if self._memory is None else self._memory.point(steps, self._notice)

    def renew(self, context: TrainingContext) -> Strategy:
        self.close()
        return Single(context)

    def close(self) -> frozenset[str] | None:
        self._batch.take_gradients()
        return None if self._memory is None else self._memory.leave()


def capabilities(settings: Settings, workers: int) -> Capabilities:
    """Return the capabilities of training in one process."""
    return Capabilities(
        fixed_point=True,
        wires=(*WHOLE_WIRES, ADAPTIVE, *PARTIAL_WIRES),
        phases=True,
        batch_losses=True,
        located=True,
        closures=True,
        communication=True,
        scales_loss=True,
    )


def validate(settings: Settings, model: nn.Module, order: BatchOrder, workers: int, largest: int) -> None:
    """Raise ConfigError if the run may have several workers."""
    if largest > 1:
        raise ConfigError(f"strategy 'single' is for one process, but there may be {largest} workers: use 'allreduce'.")
