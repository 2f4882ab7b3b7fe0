"""Logical replica of local training: its weights, its buffers, and the state of its inner optimizer.

Between two steps the model and its optimizer are at rest: they hold the outer weights. To train, a replica swaps its
own tensors in, without a copy of the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.checkpoint.tensors import REPLICA, check_savable, load_optimizer_state, optimizer_state
from paceline.checkpoint.weights.averages import KEY
from paceline.step.context import TrainingContext
from paceline.system.wires import OUTER

_State = dict[torch.Tensor, Any]


class Replica:
    """Replica of the model. It begins with the weights at rest and with a copy of the optimizer's state.

    Attributes:
        weights: its weights, by name of the parameter.
        buffers: its buffers that the forward pass changes, by name. Empty while they are those at rest.
        counts: for each fragment, the number by which its losses since the fragment was sent were divided, usually
            samples.
        sent: its weights when the fragment in flight was sent, by name. Empty if no fragment is in flight.
        rests: unsent parts of the outer gradients of each fragment (``strategies.local.sparse``).
    """

    def __init__(self, context: TrainingContext, number: int, fragments: int) -> None:
        self._context, self._prefix = context, f"{REPLICA}{number}/"
        self.weights = {name: value.detach().clone() for name, value in context.update.parameters.items()}
        self.buffers: dict[str, torch.Tensor] = {}
        self.counts = [0.0] * fragments
        self.sent: dict[str, torch.Tensor] = {}
        self.rests: dict[int, torch.Tensor] = {}
        self._state = _copied(context.update.optimizer)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Continue from the result of :meth:`tensors`, which may lack weights and buffers if they are those at rest."""
        context, start = self._context, len(self._prefix)
        own = {name[start:]: value for name, value in tensors.items() if name.startswith(self._prefix)}
        self.counts = own["count"].reshape(-1).tolist()
        for name, weight in self.weights.items():
            if (value := own.get(f"parameter/{name}")) is not None:
                weight.copy_(value)
        self.buffers, self.sent = (
            {
                name.removeprefix(kind): value.to(context.world.device, copy=True)
                for name, value in own.items()
                if name.startswith(kind)
            }
            for kind in ("buffer/", "sent/")
        )
        self.rests = {
            int(name.removeprefix("rest/")): value.to(context.world.device, copy=True)
            for name, value in own.items()
            if name.startswith("rest/") and context.settings.wire == OUTER
        }
        state = {name: value for name, value in own.items() if name.startswith("optimizer/")}
        with self._swapped(context.update.optimizer):
            load_optimizer_state(context.compute.model, context.update.optimizer, state.items())

    def tensors(self, *, weights: bool) -> dict[str, torch.Tensor]:
        """Return the tensors of the replica by name.

        Args:
            weights: whether its weights and buffers may differ from those at rest although it has not trained since.
        """
        model, optimizer = self._context.compute.model, self._context.update.optimizer
        with self._swapped(optimizer):
            check_savable(optimizer)
            found = dict(optimizer_state(model, optimizer))
        if weights or any(self.counts):
            found |= {f"parameter/{name}": value for name, value in self.weights.items()}
            found |= {f"buffer/{name}": value for name, value in self.buffers.items()}
            found |= {f"sent/{name}": value for name, value in self.sent.items()}
        found |= {f"rest/{fragment}": value for fragment, value in self.rests.items()}
        found["count"] = torch.tensor(self.counts, dtype=torch.float64).squeeze()
        return {self._prefix + name: value for name, value in found.items()}

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Put the replica into the model and the optimizer, and take it out again."""
        parameters, optimizer = self._context.update.parameters, self._context.update.optimizer
        live = dict(self._context.compute.model.named_buffers())
        at_rest = {name: value.data for name, value in parameters.items()}
        buffers = {name: live[name].clone() for name in self._context.compute.buffers.names}
        with self._swapped(optimizer):
            for name, value in parameters.items():
                value.data = self.weights[name]
            _copy_into(live, self.buffers)
            try:
                yield
            finally:
                for name, value in parameters.items():
                    value.data = at_rest[name]
                self.buffers = {name: live[name].clone() for name in self._context.compute.buffers.live}
                _copy_into(live, buffers)

    def send(self, fragment: int, names: Iterable[str], copies: bool) -> None:
        """Put a fragment in flight; ``copies`` if inner steps change its weights before it lands."""
        self.sent = {name: self.weights[name].clone() if copies else self.weights[name] for name in names}
        self.counts[fragment] = 0.0

    @torch.no_grad()
    def land(self, own: float) -> None:
        """Mix the outer weights into the fragment in flight; ``own`` is the share of the replica's own weights.

        The state of the inner optimizer stays.
        """
        for name in self.sent:
            outer, weight = self._context.update.parameters[name].detach(), self.weights[name]
            weight.copy_(outer.lerp(weight, own) if own else outer)
        self.sent = {}

    @contextmanager
    def _swapped(self, optimizer: Optimizer) -> Iterator[None]:
        at_rest: _State = dict(optimizer.state)
        _put(optimizer, self._state)
        try:
            yield
        finally:
            self._state = dict(optimizer.state)
            _put(optimizer, at_rest)


def leave_averages(optimizer: Optimizer) -> None:
    """Drop the optimizer's state at rest except for averages of the weights: the replicas have copies of it."""
    _put(optimizer, {value: {KEY: kept[KEY]} for value, kept in optimizer.state.items() if KEY in kept})


def _copied(optimizer: Optimizer) -> _State:
    return {
        value: {key: copy.deepcopy(entry) for key, entry in entries.items() if key != KEY}
        for value, entries in optimizer.state.items()
    }


def _put(optimizer: Optimizer, state: _State) -> None:
    optimizer.state.clear()
    optimizer.state.update(state)


@torch.no_grad()
def _copy_into(tensors: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    for name, value in values.items():
        tensors[name].copy_(value)
