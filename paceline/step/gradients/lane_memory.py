"""Parts of gradients that were not sent, kept for the microbatch of the same number in later steps.

::

    lane 3    gradient ─ + ─ compress ─ sum over the lanes ─ update      Error feedback: what a step leaves out is
                         │       │                                       added to the next gradient of the lane.
                         └ error ┘

A lane is the number of a microbatch in the batch. It belongs to the settings, not to a worker: workers hold lanes, and
hand them over, so the result does not depend on the number of workers. A lane's errors are tensors of a divided state,
like those of a replica (``strategies.local``): they are saved, and sent to the worker that takes the lane over.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.checkpoint.tensors import REPLICA
from paceline.errors import ConfigError
from paceline.schedule.shares import even
from paceline.step.context import TrainingContext
from paceline.step.divided.optimizer_state import DividedOptimizerState

POINT_STEPS = 100
"""Steps between two recovery points. At each point the errors of a lane are sent to a second worker."""


class LaneMemory:
    """Errors of the lanes of this worker, by lane and parameter.

    Args:
        context: training context.
        sizes: number of elements of each parameter that has errors.
    """

    def __init__(self, context: TrainingContext, sizes: Mapping[str, int]) -> None:
        self._context, self._sizes = context, sizes
        self._lanes = even(context.order.microbatches, context.world.size)[context.world.rank]
        self._errors: dict[str, torch.Tensor] = {}
        self._next: dict[str, torch.Tensor] = {}
        self.divided = DividedOptimizerState(context, self._tensors, REPLICA)
        if context.update.closure_users:
            raise ConfigError(
                f"wire = {context.settings.wire!r} keeps the unsent part of a step for the next one, but "
                f"{context.update.closure_users[0]} computes the loss several times in each step: use another format, "
                f"or an optimizer without a closure."
            )
        held = 8 * len(self._lanes) * sum(sizes.values())
        context.warnings.append(
            f"wire = {context.settings.wire}: this worker needs {held / 2**20:.1f} MiB for parts of gradients that "
            f"{len(self._lanes)} microbatches have not sent yet"
        )

    def share(self, microbatches: int) -> list[range]:
        """Return the microbatches of each rank, which are those of its lanes."""
        lanes = even(self._context.order.microbatches, self._context.world.size)
        return [range(min(own.start, microbatches), min(own.stop, microbatches)) for own in lanes]

    def error(self, parameter: str, lane: int) -> torch.Tensor:
        """Return the unsent part of a lane's gradients of a parameter, as a one-dimensional tensor."""
        return self._tensors()[_name(lane, parameter)]

    def keep(self, parameter: str, lane: int, error: torch.Tensor) -> None:
        """Set the error that counts from the next step on, if this step is accepted."""
        self._next[_name(lane, parameter)] = error

    def accept(self, finite: Mapping[str, bool]) -> None:
        """End a step. Errors of parameters that are not ``finite`` stay as before the step."""
        for name, error in self._next.items():
            if finite.get(name.partition("/feedback/")[2]):
                self._errors[name] = error
        self._next.clear()
        self.divided.hashes = None

    def point(self, steps: int, notice: int) -> Mapping[str, torch.Tensor] | None:
        """Return the errors if the workers are to keep the state after this step. See ``Strategy.point``.

        Args:
            notice: notice of the last step. If the membership is about to change, no step is to be repeated.
        """
        return self._tensors() if notice or steps % POINT_STEPS == 0 else None

    def leave(self) -> frozenset[str] | None:
        """Leave the errors to the next strategy. Return the result of ``Strategy.close``."""
        self._context.replicas.update(self._tensors())
        return None if self._context.world.size == 1 else frozenset()

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the errors of all lanes of this worker by name: zeros, or those of the state that was loaded."""
        if not self._errors:
            loaded, device = self._context.replicas, self._context.world.device
            for name, numel in (
                (_name(lane, key), numel) for lane in self._lanes for key, numel in self._sizes.items()
            ):
                known = loaded.get(name)
                self._errors[name] = torch.zeros(numel, device=device) if known is None else known.to(device, copy=True)
            loaded.clear()
        return self._errors


def _name(lane: int, parameter: str) -> str:
    return f"{REPLICA}{lane}/feedback/{parameter}"
