"""Pipeline strategies: the model is cut into stages, which different workers hold.

Synchronous schedules (layer-wise, GPipe, 1F1B, interleaved, zero bubble) compute the same as one process; the pipeline
drains at the end of each step (:mod:`paceline.strategies.pipeline.synchronous`). PipeDream and PipeDream-2BW drain only
when they must, and use older weights instead (:mod:`paceline.strategies.pipeline.pipedream`). Several workers may hold
the same stage.
"""

from __future__ import annotations

from torch import nn

from paceline.data.order import BatchOrder
from paceline.errors import ConfigError
from paceline.schedule.pipeline.choice import ASYNC_SCHEDULES, async_pipeline_for, shape_of
from paceline.settings import Settings
from paceline.step.context import TrainingContext
from paceline.strategies.base import Capabilities, Strategy
from paceline.strategies.pipeline.pipedream import PipeDream
from paceline.strategies.pipeline.synchronous import Synchronous


def build(context: TrainingContext) -> Strategy:
    return PipeDream(context) if context.settings.pipeline.schedule in ASYNC_SCHEDULES else Synchronous(context)


def capabilities(settings: Settings, workers: int) -> Capabilities:
    """Return the capabilities of the configured schedule."""
    schedule = settings.pipeline.schedule
    ignores = [] if schedule == "interleaved" else ["pipeline.chunks"]
    if schedule not in ASYNC_SCHEDULES:
        ignores += ["pipeline.update_every", "pipeline.flush_every"]
    if schedule != "pipedream":
        ignores.append("pipeline.vertical_sync")
    return Capabilities(
        exact=schedule not in ASYNC_SCHEDULES,
        exact_with="pipeline.schedule='1f1b'",
        replicated=False,
        cuts_model=True,
        divides_update=workers > 1,
        batch_losses=schedule not in ASYNC_SCHEDULES,
        carries=False,
        loop_weights=workers == 1 or schedule not in ASYNC_SCHEDULES,  # else microbatches in flight use the weights
        reads=("pipeline",),
        ignores=tuple(ignores),
    )


def validate(settings: Settings, model: nn.Module, order: BatchOrder, workers: int, largest: int) -> None:
    """Raise ConfigError if the workers cannot hold the stages, or if settings need an uncut model.

    The workers share the model, so there may be fewer microbatches than workers; but some schedules need a multiple.
    """
    if workers > 1:
        _check_layout(settings, workers, order.microbatches)
    if settings.compile:
        raise ConfigError("compile=True cannot be used with strategy 'pipeline', which cuts the model: leave it out.")
    if settings.recompute and settings.recompute != "auto":
        raise ConfigError(
            f"recompute = {list(settings.recompute)} names modules, which strategy 'pipeline' cuts: use "
            f"pipeline.recompute = true, which computes whole stages again, or recompute='auto'."
        )


def supports(settings: Settings, workers: int, microbatches: int) -> bool:
    """Return whether this number of workers can hold the stages."""
    try:
        _check_layout(settings, workers, microbatches)
    except ConfigError:
        return False
    return True


def _check_layout(settings: Settings, workers: int, microbatches: int) -> None:
    if settings.pipeline.schedule in ASYNC_SCHEDULES:
        async_pipeline_for(settings.pipeline, workers, microbatches)
    else:
        shape_of(settings.pipeline, workers)
