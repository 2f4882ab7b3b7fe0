"""What a strategy is given, what it returns, and what it can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import nn

from paceline.data.feed import Piece
from paceline.data.order import Order
from paceline.errors import ConfigError
from paceline.settings import Settings
from paceline.step.job import Job, StepResult


class Strategy(ABC):
    """Who computes which microbatch, when, and how gradients come together.

    Attributes:
        bitwise: whether ``exact`` gives the bits of the reference; see :meth:`exact_with`.
        made_exact: the settings with which it does, if it does not without them.
        reads: the settings that it reads and not every strategy does: groups such as ``server``, or single keys; see
            :meth:`ignores`.
        cuts: whether it cuts the model, and so computes its output and the loss in different places.
        sparse: whether several workers can train with sparse gradients.
        replicated: whether all workers hold the same state after each step; else only after :meth:`settle`.
        alone: what one worker does that is left of several; none: the reference.
        warnings: what a user must know of it, in sentences; it may grow.
    """

    bitwise: ClassVar[bool] = True
    made_exact: ClassVar[str] = ""
    reads: ClassVar[tuple[str, ...]] = ()
    replicated: ClassVar[bool] = True
    cuts: ClassVar[bool] = False
    sparse: ClassVar[bool] = False
    alone: ClassVar[type[Strategy] | None] = None

    def __init__(self, job: Job) -> None:
        self._job = job
        self.warnings: list[str] = []

    @classmethod  # noqa: B027 - most strategies can do everything
    def check(cls, settings: Settings, model: nn.Module, workers: int) -> None:
        """Refuse what this strategy cannot do, before the workers meet.

        Raises:
            ConfigError, InputError: says what, and what to do instead.
        """

    @classmethod
    def exact_with(cls, settings: Settings) -> bool:
        """Whether ``exact`` gives the bits of the reference with these settings."""
        return cls.bitwise

    @classmethod
    def ignores(cls, settings: Settings) -> tuple[str, ...]:
        """The keys in ``reads`` that it reads only with other settings than these."""
        return ()

    @classmethod
    def check_shares(cls, settings: Settings, order: Order, workers: int, largest: int) -> None:
        """Refuse microbatches that the workers cannot share.

        Args:
            settings: of the run.
            order: says how many microbatches a batch has.
            workers: with which training begins.
            largest: how many there may ever be.

        Raises:
            ConfigError: there are too few, or too few samples.
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

    @classmethod
    def fits(cls, settings: Settings, workers: int, microbatches: int) -> bool:
        """Whether it can go on with so many workers when some were lost or have joined.

        Args:
            settings: with which training began.
            workers: two or more.
            microbatches: of a batch.
        """
        return True

    @classmethod
    def splits(cls, settings: Settings, workers: int) -> bool:
        """Whether different ones of so many workers update different parameters."""
        return False

    @property
    def decided(self) -> bool:
        """Whether :meth:`pieces` can be asked for steps to come; it may become true after the first step."""
        return True

    @property
    def holds(self) -> frozenset[str] | None:
        """The parameters and buffers whose newest values this worker has; none: all that its steps have made."""
        return None

    @abstractmethod
    def pieces(self, step: int) -> list[range]:
        """The microbatches of a step that this worker computes, as the pieces it wants to get."""

    @abstractmethod
    def step(self, step: int, pieces: list[Piece]) -> StepResult:
        """Compute the pieces, bring the gradients together, update the model."""

    def settle(self, steps: int) -> None:  # noqa: B027
        """Bring all workers to the same state, in which the first ``steps`` steps are done; all call this together."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything, also in the middle of a step: another one takes over, in another world."""
