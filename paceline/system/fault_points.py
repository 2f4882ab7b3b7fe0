"""Fault injection points of a step, for tests (``paceline.testing.faults``).

::

    step t     before forward        the strategy's step is about to begin
               in the loader         a worker or loader process is about to read samples of step t
               sending samples       a microbatch of step t is on its way to another worker, others may follow
               inside the collective all gradients are sent; the last bucket's mean is not delivered yet
               between reduction and update
               after update          the model is that of step t + 1; no other worker has been notified
    t done     keeping replicas      the replicas have their copies on other workers; they do not know yet that all do
               in evaluate           this worker has evaluated its share; no other worker has the results
               inside a save         the tensors are written, the manifest is not
               writing a part        this rank has written its shard of a checkpoint; rank 0 is not notified yet
               during recovery       the workers begin to re-form
               sending the state     a chunk of the state is about to be sent to a worker that is behind

The code at each point calls :func:`reach`, which does nothing unless the environment variable requests faults.
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
    "sending samples",
    "keeping replicas",
    "in evaluate",
    "during recovery",
    "sending the state",
    "writing a part",
]


class OrderedFaults(Protocol):
    """Fault injector, implemented by ``paceline.testing.ordered_faults.OrderedFaults``."""

    def reach(self, point: Point, step: int) -> None:
        """Inject the faults that are planned for this point of this step."""


_ordered: OrderedFaults | None = None
_rank: Callable[[], int] = lambda: -1  # noqa: E731
"""Returns the current rank of this process, or -1 while it has none."""
_step = 0  # step that was begun last, for callers that do not know the step


def reach(point: Point, step: int | None = None) -> None:
    """Inject the faults that are planned for this point. Does nothing if no faults are armed.

    Args:
        step: step number. Defaults to the step that was begun last.

    Raises:
        RuntimeError: the planned fault is an error.
    """
    global _step
    if _ordered is None:
        return
    if point == "before forward" and step is not None:
        _step = step
    _ordered.reach(point, _step if step is None else step)


def arm(rank: Callable[[], int]) -> None:
    """Arm the faults that ``PACELINE_FAULTS`` plans, if it is set. Later calls in a process only replace ``rank``.

    Args:
        rank: function that returns the current rank of this process, or -1 before it has one.

    Raises:
        ConfigError: the variable does not hold a valid plan, or there is no directory to mark injected faults in.
    """
    global _ordered, _rank
    _rank = rank
    text = env.text(env.FAULTS)
    if _ordered is None and text is not None:
        # Imported by name, so that no module of the runtime depends on paceline.testing outside of tests.
        _ordered = import_module("paceline.testing.ordered_faults").from_environment(text, lambda: _rank())
