"""The points of a step at which tests order faults (``paceline.testing.faults``).

::

    step t     before forward        the strategy's step is about to begin
               in the loader         samples of step t are about to be read, by the worker or a loader process
               inside the collective all gradients are sent; the last bucket's mean is not delivered yet
               between reduction and update
               after update          the model is that of step t + 1, no other worker knows
    t done     in evaluate           this worker has measured its share; no one else knows
               inside a save         the tensors are written, the manifest is not
               writing a part        this rank has written its part of a checkpoint; rank 0 does not know
               during recovery       the workers begin to re-form
               sending the state     a part of the state is on its way to a worker that is behind

The code at each point calls :func:`reach`, which does nothing unless the environment ordered faults.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Literal, Protocol

from paceline.environments import env

Point = Literal[
    "before forward",
    "inside the collective",
    "between reduction and update",
    "after update",
    "inside a save",
    "in the loader",
    "in evaluate",
    "during recovery",
    "sending the state",
    "writing a part",
]


class OrderedFaults(Protocol):
    """What makes faults happen: ``paceline.testing.ordered_faults.OrderedFaults``."""

    def reach(self, point: Point, step: int) -> None:
        """Let the faults happen that are due at this point of this step."""
        ...


_ordered: OrderedFaults | None = None
_rank: Callable[[], int] = lambda: -1  # noqa: E731
"""The current rank of this process; -1 while it has none."""
_step = 0
"""The step last begun, for code that does not know it."""


def reach(point: Point, step: int | None = None) -> None:
    """Let the faults happen that are ordered for this point; without an order, do nothing.

    Args:
        point: where the caller is.
        step: the step it is about; none: the one last begun.

    Raises:
        RuntimeError: such an error is ordered.
    """
    global _step
    if _ordered is None:
        return
    if point == "before forward" and step is not None:
        _step = step
    _ordered.reach(point, _step if step is None else step)


def arm(rank: Callable[[], int]) -> None:
    """Arm the faults that ``PACELINE_FAULTS`` orders, if it is set; later calls in a process only set the rank.

    Args:
        rank: gives the current rank of this process; -1 if it has none yet.

    Raises:
        ConfigError: the variable holds no plan, or it is not known where to mark what has happened.
    """
    global _ordered, _rank
    _rank = rank
    text = env.faults()
    if _ordered is None and text is not None:
        # By name, so that no module of the runtime imports paceline.testing: it is loaded in a test's workers only.
        _ordered = import_module("paceline.testing.ordered_faults").from_environment(text, lambda: _rank())
