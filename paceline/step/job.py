"""What a step is given, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from paceline.comm.values import sendable
from paceline.comm.world import World
from paceline.data.feed import Feed, Piece
from paceline.data.objects.loop_changes import LoopChanges
from paceline.data.order import BatchOrder
from paceline.errors import InputError
from paceline.events import EventLog
from paceline.schedule.audits import AuditSchedule
from paceline.settings import Settings
from paceline.step.forward import Compute
from paceline.step.loss import Forward
from paceline.step.optimizer import Update
from paceline.step.optimizers.loss_scale import LossScale


@dataclass
class Learned:
    """What the first step has found out; it outlives the strategy, and workers that join take it over.

    ``fusible``: whether neighbouring microbatches may be computed in one pass (``step.fusion``); None: not known yet.
    ``repeatable``: whether it is known if a microbatch computed twice gives the same (``step.trials``).
    ``told``: whether the user was told that a microbatch computed twice does not give the same (it has False), or
    loaded twice does not have the same data (True).
    ``warnings``: what its user must know, in sentences.
    """

    fusible: bool | None = None
    repeatable: bool = False
    told: set[bool] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """What is to be trained, and with whom.

    ``strategy_state`` is what a strategy must remember from step to step besides the tensors: plain values under names
    of its own. They are saved in checkpoints and sent to workers that join. ``warnings`` are what its user must know of
    it, in sentences. ``given`` are the keys of the settings that somebody has set, and where. ``sparse`` says whether
    gradients may be sparse, ``divides_update`` whether different workers update different parameters; both for as many
    workers as there may ever be, so that nobody is refused when one joins. ``replicated``: all workers hold the same
    state after each step. ``phases`` are the forward passes by the names of optimizers, if a batch has several
    (``strategies.phases``). ``loop``: what the script changes between two steps. ``audits``: which steps are audited
    (``step.trials.audit``).
    """

    compute: Compute
    update: Update
    order: BatchOrder
    settings: Settings
    world: World
    events: EventLog
    feed: Feed
    loop: LoopChanges
    collate: Callable[[list[Any]], Any] | None = None
    strategy_state: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    learned: Learned = field(default_factory=Learned)
    given: Mapping[str, str] = field(default_factory=dict)
    sparse: bool = False
    divides_update: bool = False
    replicated: bool = True
    phases: Mapping[str, Forward] = field(default_factory=dict)
    audits: AuditSchedule = field(default_factory=AuditSchedule)

    def __post_init__(self) -> None:
        if self.settings.autocast == "float16":
            self.compute.loss_scale = self.update.loss_scale = LossScale(self.strategy_state, self.order.batch)


@dataclass(frozen=True)
class Batch:
    """This worker's pieces of the batch of one step.

    Attributes:
        step: the number of the step, from 0.
        epoch: the epoch it belongs to, from 0.
        samples: samples in the whole batch, over all workers.
        last: whether it is the last batch of its epoch.
        pieces: the microbatches that this worker computes.
        waited: seconds spent to load them.
        generation: of the workers for which they were loaded.
    """

    step: int
    epoch: int
    samples: int
    last: bool
    pieces: list[Piece]
    waited: float
    generation: int

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> NoReturn:
        """Say what is done with a batch instead of ``for input, target in session.batches()``.

        Raises:
            InputError: always.
        """
        raise InputError(
            "A batch is shared out among the workers, so it has no values to unpack. Write `for batch in "
            "session.batches(): session.step(batch)`; loss=, or forward=, computes with the values."
        )


@sendable
@dataclass(frozen=True)
class StepResult:
    """What one step did: the mean loss over the batch, the gradients' norm, and the learning rate used.

    ``applied`` is false for a step that was skipped because its loss, or a gradient in float16, was not finite.
    ``notice`` is about the world, from any worker (``comm.rendezvous.coordinator_client``): it is about to change, or a
    worker is to leave. ``metrics`` are the means over the batch of the metrics that the forward pass returns, by name.
    """

    loss: float
    norm: torch.Tensor | float
    learning_rate: float
    applied: bool = True
    notice: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
