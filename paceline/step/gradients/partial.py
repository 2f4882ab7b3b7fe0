"""Formats that send a part of the gradient, and keep the rest for later steps (error feedback).

All lanes of a step compress alike: which numbers a step sends is known to all workers from earlier steps. So sums of
compressed gradients are compressed sums, and are added up as gradients are, along the tree or in any order::

    lane 0    gradient + error  ─ compress ┐                    ┌ restore ─ mean gradient
    lane 1    gradient + error  ─ compress ┴ sum over the lanes ┤
              error = gradient + error - restored own part      └ the state of the next step

Error feedback with a compression that all workers share, instead of one per worker: ScaleCom (Chen et al. 2020, arXiv
2104.11125).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from paceline.step.gradients.codec import Format, Turn
from paceline.step.gradients.lane_memory import LaneMemory

State: TypeAlias = "dict[str, torch.Tensor]"
"""State of a parameter from earlier steps, which all workers know."""


class Compression(Protocol):
    """Compression of one parameter's gradient, a one-dimensional float32 tensor. The methods change no argument."""

    def start(self) -> State:
        """Return the state before the first step, on the CPU."""

    def example(self) -> torch.Tensor:
        """Return a tensor with the dtype and shape of a compressed gradient, on the CPU."""

    def compress(self, value: torch.Tensor, state: State, leads: bool) -> torch.Tensor:
        """Return the compressed gradient.

        Args:
            value: gradient of a microbatch, plus its unsent parts of earlier steps.
            state: state of this step.
            leads: whether the microbatch leads this step. The microbatches lead in turn.
        """

    def restore(self, sums: torch.Tensor, state: State) -> torch.Tensor:
        """Return the gradient from a compressed one, or the sum of gradients from the sum of compressed ones."""

    def proceed(self, sums: torch.Tensor, state: State) -> State:
        """Return the state of the next step, given the sum over all microbatches of this one."""


class Feedback(Format):
    """Format of a parameter whose compressed gradients are added up.

    Args:
        compression: compression of the gradient.
        memory: errors of the lanes.
        name: name of the parameter.
        leader: function that returns the microbatch that leads a step.
    """

    state = "feedback"

    def __init__(self, compression: Compression, memory: LaneMemory, name: str, leader: Callable[[int], int]) -> None:
        self._compression, self._memory, self._name, self._leader = compression, memory, name, leader
        self._start = compression.start()
        self._sums = torch.empty(0)

    def example(self, parameter: torch.Tensor) -> torch.Tensor:
        return self._compression.example().to(parameter.device)

    def encoded(self, parts: Sequence[slice]) -> list[slice]:
        """Return all elements: a compressed gradient cannot be cut."""
        (_,) = parts
        return [slice(0, self._compression.example().numel())]

    def bound(self, largest: float, before: Any) -> Any:
        """Return the state of the next step."""
        return self._compression.proceed(self._sums, self._state(before, self._sums.device))

    def pack(self, value: torch.Tensor, turn: Turn) -> torch.Tensor:
        """Return the compressed gradient, and keep the rest."""
        flat = value.reshape(-1).to(torch.float32).add_(self._memory.error(self._name, turn.microbatch))
        state = self._state(turn.bound, value.device)
        sent = self._compression.compress(flat, state, turn.microbatch == self._leader(turn.step))
        self._memory.keep(self._name, turn.microbatch, flat - self._compression.restore(sent, state))
        return sent

    def unpack(self, value: torch.Tensor, parameter: torch.Tensor, bound: Any) -> torch.Tensor:
        """Return the sum of gradients, with the strides of the parameter."""
        self._sums = value
        sums = self._compression.restore(value, self._state(bound, value.device)).view(parameter.shape)
        sums = sums.to(torch.promote_types(parameter.dtype, torch.float32))
        return sums if parameter.is_contiguous() else torch.empty_like(parameter, dtype=sums.dtype).copy_(sums)

    def _state(self, bound: Any, device: torch.device) -> State:
        """Return the state on the device: that of earlier steps, if it has the shapes of these settings."""
        alike = bound is not None and all(
            name in bound and bound[name].shape == value.shape for name, value in self._start.items()
        )
        return {name: value.to(device) for name, value in (bound if alike else self._start).items()}
