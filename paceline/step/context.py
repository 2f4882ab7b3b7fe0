"""Training context of a step, the batch that it gets, and the result that it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from paceline.comm.values import sendable
from paceline.comm.world import World
from paceline.data.feed import Feed, MicrobatchGroup
from paceline.data.objects.loop_changes import LoopChanges
from paceline.data.order import BatchOrder
from paceline.errors import InputError
from paceline.events import EventLog
from paceline.schedule.audits import AuditSchedule
from paceline.settings import Settings
from paceline.step.forward import ForwardRunner
from paceline.step.loss import Forward
from paceline.step.optimizer import OptimizerStep
from paceline.step.optimizers.exclusive import refuse_parts
from paceline.step.optimizers.loss_scale import LossScale


@dataclass
class ProbeResults:
    """Results of the first step's probes. They outlive the strategy, and workers that join receive them.

    ``fusible``: whether neighboring microbatches may be computed in one pass (``step.gradients.fusion``). None if
    unknown.
    ``repeatable``: whether the forward pass has been checked for repeatability (``step.probes``).
    ``told``: kinds of warnings already given: False for a recomputed microbatch that differed, True for a reloaded
    microbatch whose data differed. ``warnings``: sentences that the user must read. ``slices_alike``: whether the
    optimizer gives slices the bits of whole parameters (``step.probes.slice_probe``). None if unknown. Not sent.
    """

    fusible: bool | None = None
    repeatable: bool = False
    told: set[bool] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)
    slices_alike: bool | None = None


@dataclass
class HeldShare:
    """Share of a divided state that this worker holds between two memberships, until all workers have their new shares.

    ``names``: parameters and slices of parameters (``schedule.slices``). Their values are in the parameters, unless
    they are in ``tensors``. ``tensors``: their optimizer state by name. ``is_handed_on``: whether this worker, which
    leaves, has given others the state that only it had. ``has_weights``: whether the values of all other parameters are
    those of the same step. ``number``: number of the share, and number of shares, if the division is equal.
    """

    names: set[str] = field(default_factory=set)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    is_handed_on: bool = False
    has_weights: bool = False
    number: tuple[int, int] | None = None

    def add(self, names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> None:
        """Add parameters and slices with their optimizer state."""
        self.names.update(names)
        self.tensors.update(tensors)

    def clear(self) -> None:
        self.names.clear()
        self.tensors.clear()
        self.is_handed_on, self.has_weights, self.number = False, False, None


@dataclass(frozen=True)
class TrainingContext:
    """Training context: the model, the data and the settings of a run, and the workers that train.

    ``strategy_state``: plain values that a strategy must remember from step to step besides tensors, under names of its
    own. They are saved in checkpoints and sent to workers that join. ``warnings``: sentences about the run that the
    user must read. ``given`` maps the keys of settings that were set to where they were set. ``sparse``: names of the
    weights of embeddings with sparse gradients; ``any_sparse``: whether any code may give such gradients.
    ``divides_update``: whether different workers update different parameters. ``divides_state``: whether they hold the
    optimizer's state in shares, between steps and when they synchronize. These apply to the largest number of workers
    that the run may have, so that no joining worker is refused.
    ``replicated``: all workers hold the same state after each step. ``phases``: forward passes by optimizer name, if a
    batch has several (``strategies.phases``). ``loop``: changes by the script between two steps. ``audits``: which
    steps are audited (``step.probes.audit``). ``prepared``: objects that a strategy has made before the state was
    loaded. ``held``: this worker's share of a divided state while no strategy has it. ``replicas``: tensors of the
    replicas of local training by name, while no strategy has them. ``revealed``: outer steps for which this worker has
    revealed shares of masks (``strategies.local.masking``).
    """

    compute: ForwardRunner
    update: OptimizerStep
    order: BatchOrder
    settings: Settings
    world: World
    events: EventLog
    feed: Feed
    loop: LoopChanges
    collate: Callable[[list[Any]], Any] | None = None
    strategy_state: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    probe_results: ProbeResults = field(default_factory=ProbeResults)
    given: Mapping[str, str] = field(default_factory=dict)
    sparse: frozenset[str] = frozenset()
    any_sparse: bool = False
    divides_update: bool = False
    divides_state: bool = False
    replicated: bool = True
    phases: Mapping[str, Forward] = field(default_factory=dict)
    prepared: list[Any] = field(default_factory=list)
    held: HeldShare = field(default_factory=HeldShare)
    replicas: dict[str, torch.Tensor] = field(default_factory=dict)
    revealed: set[int] = field(default_factory=set)
    audits: AuditSchedule = field(default_factory=AuditSchedule)

    def end(self) -> None:
        """Drop what the last strategy has left when the session ends, and refuse its optimizer if that was a share."""
        self.replicas.clear()
        if self.held.names:
            refuse_parts(self.update.optimizer)
            self.held.clear()

    def __post_init__(self) -> None:
        if self.settings.autocast == "float16":
            self.compute.loss_scale = self.update.loss_scale = LossScale(self.strategy_state, self.order.batch)


_NO_VALUES = (
    "A batch is shared out among the workers, so it has no {values}. Write `for batch in session.batches(): "
    "session.step(batch)`; loss=, or forward=, computes with the values, and returns what batch_loss= needs of them."
)


@dataclass(frozen=True)
class Batch:
    """This worker's microbatch groups in the batch of one step.

    Attributes:
        step: step number, from 0.
        epoch: epoch of the step, from 0.
        samples: number of samples in the whole batch, over all workers; also ``len(batch)``.
        last: whether it is the last batch of its epoch.
        groups: groups that this worker computes, each with ``microbatches`` (a range), ``samples`` and ``data``, unless
            another worker sends the data during the step.
        waited: seconds spent loading them.
        generation: membership generation for which they were loaded. If it changes before the step, others are loaded.
    """

    step: int
    epoch: int
    samples: int
    last: bool
    groups: list[MicrobatchGroup]
    waited: float
    generation: int

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> NoReturn:
        """Refuse to unpack a batch, as in ``for input, target in session.batches()``, and explain what to write."""
        raise InputError(_NO_VALUES.format(values="values to unpack"))

    def __getitem__(self, place: Any) -> NoReturn:
        raise InputError(_NO_VALUES.format(values="values to read"))

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse to read a value of a batch, as in ``batch.inputs`` and ``batch.to(device)``.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(_NO_VALUES.format(values=repr(name)), name=name, obj=self)


@sendable
@dataclass(frozen=True)
class StepResult:
    """Result of one step: the mean loss over the batch, the norm of the gradients, and the learning rate used.

    ``applied`` is False for a step that was skipped because its loss, or a gradient in float16, was not finite.
    ``notice``: notice from any worker (``comm.rendezvous.coordinator_client``) that the membership is about to change,
    or that a worker is to leave. ``metrics``: means over the batch of the metrics that the forward pass returns, by
    name. ``paced_over``: number of newest steps over which the throughput is averaged. More than 1 if other workers
    may have computed the step, so that it took this worker no time.
    """

    loss: float
    norm: torch.Tensor | float
    learning_rate: float
    applied: bool = True
    notice: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    paced_over: int = 1
