"""Everything in one process: the reference that the others are compared with.

::

    for each microbatch m:   forward, backward      the gradient of the sum of its losses
    add them up along the canonical tree, divide by the count, update
"""

from __future__ import annotations

from torch import nn

from paceline.data.feed import Piece
from paceline.errors import ConfigError
from paceline.settings import Settings
from paceline.strategies.base import Job, Outcome, Strategy
from paceline.strategies.outcome import conclude
from paceline.strategies.whole import Whole


class Single(Strategy):
    """Plain PyTorch in one process."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._whole = Whole(job, sparse=True)

    @classmethod
    def check(cls, settings: Settings, model: nn.Module, workers: int) -> None:
        if workers > 1:
            raise ConfigError(
                f"strategy 'single' is for one process, but there are {workers} workers: use 'allreduce'."
            )

    @property
    def decided(self) -> bool:
        return self._whole.decided

    def pieces(self, step: int) -> list[range]:
        return self._whole.pieces(step)

    def step(self, step: int, pieces: list[Piece]) -> Outcome:
        parts, changed = self._whole.gradients(step, pieces)
        return conclude(self._job, step, pieces, parts, changed, self._job.world.notice())

    def close(self) -> None:
        self._whole.take_gradients()
