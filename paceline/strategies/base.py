"""What a strategy is given, what it returns, and the four things it can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from paceline.comm.world import World
from paceline.config import Settings
from paceline.data.feed import Piece
from paceline.data.order import Order
from paceline.events import EventLog
from paceline.strategies.compute import Compute
from paceline.strategies.update import Update


@dataclass(frozen=True)
class Job:
    """What is to be trained, and with whom."""

    compute: Compute
    update: Update
    order: Order
    settings: Settings
    world: World
    events: EventLog
    data: Any
    collate: Callable[[list[Any]], Any] | None = None


@dataclass(frozen=True)
class Outcome:
    """What one step did: the mean loss over the batch, the gradients' norm, and the learning rate used.

    ``applied`` is false for a step that was skipped because its loss was not finite. ``notice`` is what the workers
    told each other of the world (``comm.line``): whether it is about to change, or a worker is to leave.
    """

    loss: float
    norm: torch.Tensor
    learning_rate: float
    applied: bool = True
    notice: int = 0


class Strategy(Protocol):
    """Who computes which microbatch, when, and how gradients come together."""

    def __init__(self, job: Job) -> None: ...

    @property
    def decided(self) -> bool:
        """Whether :meth:`pieces` stays as it is; it may change once, after the first step."""
        ...

    def pieces(self, step: int) -> list[range]:
        """The microbatches of a step that this worker computes, as the pieces it wants to get."""
        ...

    def step(self, step: int, pieces: list[Piece]) -> Outcome:
        """Compute the pieces, bring the gradients together, update the model."""
        ...

    def close(self) -> None:
        """Let go of everything, also in the middle of a step: another one takes over, in another world."""
        ...
