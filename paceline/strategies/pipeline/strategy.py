"""A model that is cut into stages, which different workers hold.

::

    1f1b, 3 stages, 4 microbatches     F forward   B backward   U update

    stage 0    F0 F1 F2 .  .  B0 F3 .  B1 .  B2 .  B3 U
    stage 1    .  F0 F1 .  B0 F2 B1 F3 .  B2 .  B3 .  U
    stage 2    .  .  F0 B0 F1 B1 F2 B2 .  F3 B3 .  .  U

Synchronous schedules (layer-wise, GPipe, 1F1B, interleaved, zero bubble) compute what one process computes; the
pipeline runs empty at the end of each step (:mod:`paceline.strategies.pipeline.synchronous`). PipeDream and
PipeDream-2BW never let it, and use older weights instead (:mod:`paceline.strategies.pipeline.pipedream`). Several
workers may hold the same stage.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from paceline.data.feed import Piece
from paceline.data.order import Order
from paceline.errors import ConfigError
from paceline.schedule.choice import STREAMED, shape_of, stream_for
from paceline.settings import Settings
from paceline.step.job import Job, StepResult
from paceline.strategies.base import Strategy
from paceline.strategies.pipeline.pipedream import PipeDream
from paceline.strategies.pipeline.synchronous import Synchronous


class Pipeline(Strategy):
    """Stages of the model on different workers."""

    made_exact: ClassVar[str] = "pipeline.schedule='1f1b'"
    reads: ClassVar[tuple[str, ...]] = ("pipeline",)
    replicated: ClassVar[bool] = False
    cuts: ClassVar[bool] = True

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._at_work: Synchronous | PipeDream
        if job.settings.pipeline.schedule in STREAMED:
            self._at_work = PipeDream(job)
            self.warnings.append(
                f"schedule {job.settings.pipeline.schedule!r} uses older weights for microbatches under way: the bits "
                f"are not those of one process, and the loss reported is that of the microbatches that have come back"
            )
        else:
            self._at_work = Synchronous(job, self.warnings.append)

    @classmethod
    def check(cls, settings: Settings, model: nn.Module, workers: int) -> None:
        if workers > 1:
            shape_of(settings.pipeline, workers)
        if settings.compile:
            raise ConfigError(
                "compile=True cannot be used with strategy 'pipeline', which cuts the model: leave it out."
            )
        if settings.recompute:
            raise ConfigError(
                f"recompute = {list(settings.recompute)} names modules, which strategy 'pipeline' cuts: use "
                f"pipeline.recompute = true, which computes whole stages again."
            )

    @classmethod
    def check_shares(cls, settings: Settings, order: Order, workers: int, largest: int) -> None:
        """The workers share the model, so there may be fewer microbatches; but some schedules need a number of them.

        Raises:
            ConfigError: there are too few of them, or not a multiple of the workers of a stage.
        """
        if workers > 1 and settings.pipeline.schedule in STREAMED:
            stream_for(settings.pipeline, workers, order.microbatches)

    @classmethod
    def fits(cls, settings: Settings, workers: int, microbatches: int) -> bool:
        try:
            if settings.pipeline.schedule in STREAMED:
                stream_for(settings.pipeline, workers, microbatches)
            else:
                shape_of(settings.pipeline, workers)
        except ConfigError:
            return False
        return True

    @classmethod
    def splits(cls, settings: Settings, workers: int) -> bool:
        return workers > 1

    @classmethod
    def exact_with(cls, settings: Settings) -> bool:
        return settings.pipeline.schedule not in STREAMED

    @classmethod
    def ignores(cls, settings: Settings) -> tuple[str, ...]:
        schedule = settings.pipeline.schedule
        unread = [] if schedule == "interleaved" else ["pipeline.chunks"]
        if schedule not in STREAMED:
            unread += ["pipeline.update_every", "pipeline.flush_every"]
        if schedule != "pipedream":
            unread.append("pipeline.vertical_sync")
        return tuple(unread)

    @property
    def holds(self) -> frozenset[str] | None:
        return self._at_work.staged.holds

    def pieces(self, step: int) -> list[range]:
        return self._at_work.pieces(step)

    def step(self, step: int, pieces: list[Piece]) -> StepResult:
        return self._at_work.step(step, pieces)

    def settle(self, steps: int) -> None:
        self._at_work.settle()

    def close(self) -> None:
        self._at_work.close()
