"""The seam between the training loop and the algorithms: a strategy, and what it can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from paceline.data.feed import Piece
from paceline.data.order import BatchOrder
from paceline.errors import ConfigError
from paceline.settings import Settings
from paceline.step.job import StepResult


class Strategy(ABC):
    """Who computes which microbatch, when, and how gradients come together.

    Built from a :class:`~paceline.step.job.Job` for one world; when workers come or go it is closed, and a new one is
    built. What must outlive it goes into ``job.strategy_state``; what its user must know, into ``job.warnings``.
    """

    @abstractmethod
    def pieces(self, step: int) -> list[range]:
        """The microbatches of a step to load for this worker, as the pieces it computes in one pass each.

        Asked ahead, while earlier steps are computed, once the first step of this strategy is done. Empty if it is
        known only inside the step; :meth:`step` then loads what it needs.
        """

    @abstractmethod
    def step(self, step: int, pieces: list[Piece]) -> StepResult:
        """Compute the pieces, bring the gradients together, update the model."""

    def synchronize(self, steps: int) -> None:  # noqa: B027 - most strategies do so in each step
        """Bring all workers to the same state, in which the first ``steps`` steps are done; all call this together."""

    @abstractmethod
    def close(self) -> frozenset[str] | None:
        """Release everything, also in the middle of a step.

        Returns:
            the parameters and buffers whose newest values this worker holds; None: all of them.
        """


@dataclass(frozen=True)
class Capabilities:
    """What a strategy can do, with given settings and on so many workers.

    Attributes:
        exact: ``exact`` gives the bits of one process.
        fixed_point: it can do so in fixed point, too.
        exact_with: the settings with which it does, if these are not; for the error message.
        replicated: all workers hold the same state after each step, not only after :meth:`Strategy.synchronize`.
        cuts_model: the output and the loss are computed in different places.
        sparse_gradients: several workers can train with sparse gradients.
        divides_update: different workers update different parameters.
        makes_all_updates: each worker makes all updates of the weights that it trains, with one optimizer.
        phases: a batch may have several losses in turns, each for the parameters of its own optimizer.
        closures: it can compute a step again, for an optimizer that needs a closure.
        scales_loss: gradients may be those of a scaled loss until they have come together.
        averages: whoever updates a parameter sees all its updates, as an average of weights needs it.
        carries: a step computes all microbatches of its batch, after the update of the step before: so states may go
            from each microbatch to the one in its place in the next batch.
        audits: workers look again, while training goes on, whether a microbatch depends on who computes it.
        loop_weights: weights that the script changes between two steps are those that the next one trains.
        reads: the settings that not every strategy reads: groups such as ``server``, or single keys.
        ignores: keys among these that have no effect as the others are set.
    """

    exact: bool = True
    fixed_point: bool = False
    exact_with: str = ""
    replicated: bool = True
    cuts_model: bool = False
    sparse_gradients: bool = False
    divides_update: bool = False
    makes_all_updates: bool = True
    phases: bool = False
    closures: bool = False
    scales_loss: bool = False
    averages: bool = True
    carries: bool = True
    audits: bool = True
    loop_weights: bool = True
    reads: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()


def check_shares(settings: Settings, order: BatchOrder, workers: int, largest: int) -> None:
    """Refuse a batch that cannot be shared out by microbatches.

    Args:
        settings: of the run.
        order: how many microbatches a batch has.
        workers: with which training begins.
        largest: how many there may ever be.

    Raises:
        ConfigError: there are too few microbatches or samples.
    """
    if order.batch < workers:
        raise ConfigError(
            f"batch = {order.batch} is smaller than the number of workers, {workers}: use a larger batch or fewer "
            f"workers."
        )
    if largest > order.microbatches:
        raise ConfigError(
            f"{largest} workers are more than the {order.microbatches} microbatches of a batch: set microbatches "
            f"to {largest} or more (it is part of what decides the bits), or use fewer workers."
        )
