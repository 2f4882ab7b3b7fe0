"""Recurrent state that a microbatch passes to the same microbatch of the next batch (truncated backpropagation).

::

    step        0       1       2                  rows of a batch are streams of tokens, cut equally in each step
    rows 0-1    F ─s─▶  F ─s─▶  F ─s─▶             microbatch 0, on whichever worker
    rows 2-3    F ─s─▶  F ─s─▶  F ─s─▶             microbatch 1

Williams and Peng 1990. States are detached, so gradients end at the start of a batch. Before the update of a step all
workers receive all states. So any worker can compute a microbatch of the next step, and no state is lost with a worker.
An epoch starts without states.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.comm.world import World
from paceline.data.nested import map_tensors
from paceline.data.order import UNKNOWN, BatchOrder
from paceline.data.recurrent.token_rows import TokenRows
from paceline.errors import ConfigError, InputError

States = dict[int, Any]


def takes_state(forward: Any) -> bool:
    """Return whether ``forward`` has a third positional parameter without a default, ``state``."""
    if isinstance(forward, Mapping):
        for name, one in forward.items():
            if takes_state(one):
                raise ConfigError(
                    f"The forward pass of optimizer {name!r} takes a state from batch to batch, which losses that take "
                    f"turns cannot do: give it two parameters, (model, microbatch)."
                )
        return False
    if not callable(forward):
        return False
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return False
    by_position = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return len([one for one in parameters if one.default is one.empty and one.kind in by_position]) > 2


def check_rows(order: BatchOrder, data: Any) -> None:
    """Raise InputError if the rows of a batch are known not to continue the rows of the previous batch."""
    if order.cut is not None:
        raise InputError(
            "forward(model, microbatch, state) gives a microbatch the state of the same rows of the batch before, but "
            "microbatch_order may put other rows into it: leave out microbatch_order."
        )
    rows = data.rows if isinstance(data, TokenRows) else order.batch
    if rows != order.batch:
        raise InputError(f"The data are {rows} rows of tokens, but batch = {order.batch}: set batch to {rows}.")
    end = order.first_of(1)
    if end != UNKNOWN and order.samples_of(end - 1) < order.batch:
        raise _short(order, end - 1)


def _short(order: BatchOrder, step: int) -> InputError:
    return InputError(
        f"The batch of step {step} has {order.samples_of(step)} samples instead of {order.batch}, so its rows do not "
        f"continue those of the previous batch, whose state they would get: set drop_last=True, or give full batches."
    )


def _pair_of(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise InputError(
            f"forward(model, microbatch, state) must return a pair (loss, next state), but it returned a "
            f"{type(result).__name__}."
        )
    return result


class CarriedState:
    """States of all microbatches after the last step.

    Args:
        forward: ``forward(model, microbatch, state)``, which returns the loss and the next state. The state is None at
            the start of an epoch.
    """

    def __init__(self, forward: Callable[..., Any], order: BatchOrder, device: torch.device) -> None:
        self._forward, self._order, self._device = forward, order, device
        self._epoch = 0
        self._states: States = {}
        self._next: dict[int, tuple[int, Any]] = {}  # step and next state of each microbatch that this worker computed
        self._along = False
        self._left: Any = None  # state after the segment before, in an evaluation

    def forward(self, model: nn.Module, data: Any, step: int, microbatch: int) -> Any:
        """Run the forward pass of a microbatch on a copy of its state, which the pass may change in place.

        Raises:
            InputError: the pass does not return a pair (loss, next state), or the batch is short.
        """
        if self._order.samples_of(step) < self._order.batch:
            raise _short(self._order, step)
        state = self._states.get(microbatch) if self._epoch == self._order.epoch_of(step) else None
        copied = map_tensors(self._copy, state)
        loss, following = _pair_of(self._forward(model, data, copied))
        self._next[microbatch] = step, map_tensors(torch.detach, following)
        return loss

    def alone(self, model: nn.Module, data: Any) -> Any:
        """Return the loss of a forward pass outside of training. It starts without a state, except in :meth:`along`."""
        loss, following = _pair_of(self._forward(model, data, self._left))
        self._left = following if self._along else None
        return loss

    @contextmanager
    def along(self) -> Iterator[None]:
        """Carry the state from each forward pass outside of training to the next in this context."""
        self._along = True
        try:
            yield
        finally:
            self._along, self._left = False, None

    def _copy(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self._device, copy=True)

    def following(self) -> dict[int, tuple[int, Any]]:
        """Return the step and next state of each microbatch that this worker computed."""
        return dict(self._next)

    def set_following(self, following: dict[int, tuple[int, Any]]) -> None:
        """Restore states that :meth:`following` returned."""
        self._next = following

    def exchange(self, world: World, step: int) -> States:
        """Gather the states of all microbatches after a step. Every worker must call this.

        Raises:
            InputError: a state has a value that cannot be sent.
        """
        own = {microbatch: state for microbatch, (of, state) in self._next.items() if of == step}
        everyone = world.gather(own, "step")
        return {microbatch: state for states in reversed(everyone) for microbatch, state in states.items()}

    def accept(self, step: int, states: States) -> None:
        """Replace all states by those after a step, once its update is done."""
        self._epoch, self._states, self._next = self._order.epoch_of(step), states, {}

    def state(self, step: int) -> dict[str, Any]:
        """Return the states, for a checkpoint."""
        return {"epoch": self._epoch, "states": self._states}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from the states of a checkpoint or of another worker."""
        self._epoch, self._next = state["epoch"], {}
        self._states = {int(microbatch): one for microbatch, one in state["states"].items()}
