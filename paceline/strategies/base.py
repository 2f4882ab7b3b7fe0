"""Interface between the training loop and the strategies: a strategy and its capabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

import torch

from paceline.data.feed import MicrobatchGroup
from paceline.data.nested import map_tensors
from paceline.data.order import BatchOrder
from paceline.errors import ConfigError
from paceline.settings import Settings
from paceline.step.checks import Sparse
from paceline.step.context import StepResult, TrainingContext
from paceline.step.divided.optimizer_state import DividedOptimizerState
from paceline.system.wires import ADAPTIVE, OUTER, PARTIAL_WIRES, Wire

WIRES: tuple[str, ...] = get_args(Wire)
WHOLE_WIRES = tuple(one for one in WIRES if one not in (ADAPTIVE, OUTER, *PARTIAL_WIRES))
"""Formats that send the whole gradient of a step, in the same bits in all steps. No worker keeps a part of it."""


class LossPlace(NamedTuple):
    """Workers that compute the loss over the whole batch if the model is cut into stages."""

    workers: Sequence[int]  # ranks of these workers
    tensors: Collection[str]  # names of the parameters and buffers that the loss may use, because no layer uses them


class Strategy(ABC):
    """Decision about which worker computes which microbatch, when, and how gradients are combined.

    Built from a :class:`~paceline.step.context.TrainingContext` for one membership. After a membership change it is
    closed, and a new one is built. Put state that must outlive it into ``context.strategy_state``, and messages for the
    user into ``context.warnings``.
    """

    @abstractmethod
    def groups(self, step: int) -> list[range]:
        """Return the microbatches of a step to load on this worker, grouped as it computes them in one pass each.

        From the second step on, the loader calls this ahead of time, while earlier steps are computed. Returns an empty
        list if the groups are known only inside the step; :meth:`step` then loads the data itself.
        """

    def encodes(self, step: int) -> list[range]:
        """Return the microbatches that this worker computes in the first pass of a loss over the whole batch.

        Defaults to :meth:`groups`. All workers together must cover the batch.
        """
        return self.groups(step)

    def encode(self, context: TrainingContext, step: int, groups: list[MicrobatchGroup]) -> None:
        """Run the forward passes of these microbatches (:meth:`encodes`) for a loss over the whole batch."""
        for group in groups:
            context.world.check()
            data = map_tensors(torch.clone, group.data)  # forward may change it
            context.compute.forward_pass(replace(group, data=data), step)

    @property
    def loss_place(self) -> LossPlace | None:
        """Workers that compute the loss over the whole batch. None if all do, because each has the whole model."""
        return None

    @abstractmethod
    def step(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        """Compute the microbatch groups, reduce the gradients and update the model."""

    def synchronize(self, steps: int) -> None:  # noqa: B027 - most strategies do so in each step
        """Bring all workers to the same state after the first ``steps`` steps. All workers call this together.

        Each worker then has all weights and buffers, and the whole state of the optimizer unless it is :attr:`divided`.
        """

    def unite(self, steps: int) -> None:
        """Give every worker the whole state after the first ``steps`` steps. All workers call this together."""
        self.synchronize(steps)

    def hand_on(self, steps: int) -> None:
        """Pass on state that only leaving workers hold. All workers call this together."""
        self.unite(steps)

    @property
    def divided(self) -> DividedOptimizerState | None:
        """Optimizer state that is divided among the workers. None if each worker has all of it when synchronized."""
        return None

    @property
    def held(self) -> frozenset[str] | None:
        """Names of the parameters whose newest values this worker has between two steps. None if it has all."""
        return None

    def point(self, steps: int) -> Mapping[str, torch.Tensor] | None:
        """Return the tensors of this worker's replicas if ``steps`` steps is a state to which the workers can return.

        The workers keep that state in memory, with a copy of these tensors. Returns None after other steps, and if the
        loss of a worker costs no steps.
        """
        return None

    @property
    def why_unsaved(self) -> str:
        """Reason why the state between two steps cannot be saved now. Empty if it can."""
        return ""

    def settle(self) -> None:  # noqa: B027 - most steps end when all weights are known
        """Raise WorkerLost if a worker was lost after the last step, before all weights were exchanged."""

    @property
    def undecided(self) -> bool:
        """Whether the loss of a worker has interrupted a step that other workers may have completed.

        Call :meth:`decide` after :meth:`close`.
        """
        return False

    def decide(self, norm: torch.Tensor | float | None) -> frozenset[str] | None:
        """Make the interrupted update with the norm of the gradients that others used, or drop it if ``norm`` is None.

        Returns as :meth:`close` does.
        """
        raise NotImplementedError

    def renew(self, context: TrainingContext) -> Strategy:
        """Return a strategy that continues with different formats and buckets. All workers call this between two steps.

        Only strategies with the capability ``communication`` implement it.
        """
        raise NotImplementedError

    @abstractmethod
    def close(self) -> frozenset[str] | None:
        """Release all resources, even in the middle of a step.

        Returns:
            Names of the parameters and buffers whose newest values this worker holds. None if it holds all of them.
        """


class Delegating(Strategy):
    """Base of strategies that add something to the steps of an inner strategy."""

    _inner: Strategy

    def groups(self, step: int) -> list[range]:
        return self._inner.groups(step)

    def synchronize(self, steps: int) -> None:
        self._inner.synchronize(steps)

    def unite(self, steps: int) -> None:
        self._inner.unite(steps)

    def hand_on(self, steps: int) -> None:
        self._inner.hand_on(steps)

    @property
    def divided(self) -> DividedOptimizerState | None:
        return self._inner.divided

    def point(self, steps: int) -> Mapping[str, torch.Tensor] | None:
        return self._inner.point(steps)

    @property
    def held(self) -> frozenset[str] | None:
        return self._inner.held

    def settle(self) -> None:
        self._inner.settle()

    @property
    def undecided(self) -> bool:
        return self._inner.undecided

    def decide(self, norm: torch.Tensor | float | None) -> frozenset[str] | None:
        return self._inner.decide(norm)

    def close(self) -> frozenset[str] | None:
        return self._inner.close()


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a strategy with given settings and a given number of workers."""

    exact: bool = True  # whether ``exact`` gives the same bits as one process
    fixed_point: bool = False  # whether ``exact="fixed-point"`` is supported
    wires: tuple[str, ...] = ("float32",)  # formats of gradients on the wire (setting ``wire``) that are supported
    exact_with: str = ""  # settings with which the strategy is exact if the current ones are not, for the error message
    replicated: bool = True  # whether all workers hold the same state after each step, not only after ``synchronize``
    cuts_model: bool = False  # whether the model is cut, so that its output and the loss are computed separately
    sparse_gradients: Sparse = "none"  # which gradients may be sparse with several workers
    divides_update: bool = False  # whether different workers update different parameters
    replicas: int = 0  # replicas of the model that workers hold between synchronizations. 0 if there is only the model
    # whether a batch may have several losses in turn, each for the parameters of its own optimizer
    phases: bool = False
    # whether all microbatches of a batch may be computed before the step, for a loss over all of them
    batch_losses: bool = False
    closures: bool = False  # whether a step can be repeated, for an optimizer that needs a closure
    communication: bool = False  # whether ``communication`` may change buckets and formats between two steps
    scales_loss: bool = False  # whether the loss may be scaled, with gradients that stay scaled until they are reduced
    # whether a worker that updates a parameter sees every update of it, which an average of weights needs
    averages: bool = True
    # whether a step computes all microbatches of its batch after the previous update, each on one worker, so that state
    # may be carried from each microbatch to the microbatch at the same index in the next batch
    carries: bool = True
    located: bool = False  # whether a worker may compute any set of microbatches, for samples that not all workers have
    # whether workers check during training that a microbatch does not depend on the worker that computes it
    audits: bool = True
    # whether weights that the script changes between two steps are the ones that the next step trains
    loop_weights: bool = True
    # For predictions of a worker's memory: the stage of ZeRO (1: the workers divide the optimizer's state, 2: also the
    # gradients, 3: also the weights), and whether all workers compute even shares of a batch.
    divides_state: int = 0
    even_shares: bool = False
    # whether the workers of a machine may share one copy of the weights, which the strategy fills with initial values
    shares_weights: bool = False
    reads: tuple[str, ...] = ()  # settings that not every strategy reads: groups such as ``server``, or single keys
    ignores: tuple[str, ...] = ()  # keys in ``reads`` that have no effect with the other given settings


def sparse_if_plain(settings: Settings) -> Sparse:
    """Return ``modules``, or ``none`` if gradients are encoded, because rows are added up without a format."""
    coded = settings.fixed_point or settings.wire != "float32" or settings.communication != "fixed"
    return "none" if coded else "modules"


def check_shares(settings: Settings, order: BatchOrder, workers: int, largest: int) -> None:
    """Raise ConfigError if a batch cannot be shared among the workers by microbatches.

    Args:
        workers: number of workers at the start.
        largest: largest possible number of workers during the run.
    """
    count, most = order.microbatches, max(workers, largest)
    if most > count:
        grows = f" (the run may grow from {workers} to {most})" if most > workers else ""
        of_batch, batch = (f" (batch = {order.batch})", "batch and ") if order.batch < most else ("", "")
        raise ConfigError(
            f"{most} workers{grows} are more than the {count} microbatches of a batch{of_batch}, so a worker would "
            f"have nothing to compute. Use at most {count} workers, or set {batch}microbatches to {most} or more, in "
            f"paceline.start or by --set microbatches={most}. Another number of microbatches gives other bits."
        )
