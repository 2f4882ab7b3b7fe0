"""PipeDream computed by hand in one process, with plain torch: which weights each stage uses for each microbatch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from subjects import Arguments, classes
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline
from paceline.data.order import Order

Microbatch = tuple[torch.Tensor, torch.Tensor]
Version = Callable[[int, int], int]
"""The version of the weights that a stage uses for a microbatch."""


class Scaled(nn.Module):
    """Has a buffer that nothing changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((16,), 1.5, dtype=torch.float64))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.scale, torch.Tensor)
        return values * self.scale


class Back(nn.Module):
    """From 4 numbers to 16 with the weights of a layer that goes the other way."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.weight = other.weight

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values @ self.weight


def layers() -> nn.Sequential:
    """May be cut before any of its seven layers."""
    torch.manual_seed(12)
    linear = [nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 4)]
    first, second, third = (layer.double() for layer in linear)
    norm = nn.BatchNorm1d(16).double()
    return nn.Sequential(first, Scaled(), norm, nn.Tanh(), second, nn.Tanh(), third)


def tied() -> nn.Sequential:
    """The first layer and the fourth have the same weights."""
    torch.manual_seed(13)
    first, last = nn.Linear(12, 4).double(), nn.Linear(12, 4).double()
    return nn.Sequential(first, nn.Tanh(), nn.Linear(4, 4).double(), Back(first), nn.Tanh(), last)


def data(length: int) -> TensorDataset:
    return classes(length, dtype=torch.float64)


def microbatches(length: int, batch: int, count: int, steps: Sequence[int]) -> list[Microbatch]:
    """Those of some steps, as a session with seed 0 makes them."""
    values, targets = data(length).tensors
    order = Order(length, batch, count, 0)
    return [(values[part], targets[part]) for step in steps for part in order.microbatches_of(step)]


class ByHand:
    """A model in stages.

    Args:
        model: the layers.
        cut: where stages begin, except the first.
        lags: so many microbatches a stage is ahead of its backward passes.
        every: microbatches of an update.
        version: which weights a stage uses for a microbatch.
        newest: backward passes use the newest weights instead: what weight stashing is there to avoid.
        late: the updates after which tied weights come back to a stage that has borrowed them.
    """

    def __init__(
        self,
        model: nn.Sequential,
        cut: Sequence[int],
        lags: Sequence[int],
        every: int,
        version: Version,
        newest: bool = False,
        late: int = 0,
    ) -> None:
        places = [0, *cut, len(model)]
        self.stages = [copy.deepcopy(model[begin:end]) for begin, end in pairwise(places)]
        self.optimizers = [torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9) for stage in self.stages]
        self.lags, self.every, self.version, self.newest, self.late = lags, every, version, newest, late
        self.borrower = next(
            (place for place, stage in enumerate(self.stages) if any("Back" in str(m) for m in stage)), 0
        )

    def until_empty(self, entering: Sequence[Microbatch]) -> None:
        """Microbatches enter one after the other, then the pipeline runs empty."""
        stages = range(len(self.stages))
        self.weights = [[self._weights(stage)] for stage in stages]
        self.buffers = [[self._buffers(stage)] for stage in stages]
        self._begin_group()
        for number, microbatch in enumerate(entering):
            self._compute(number, *microbatch)
            if (number + 1) % self.every == 0 or number + 1 == len(entering):
                self._update()
        if self.borrower:
            self._borrowed().data = self._owned().data.clone()

    def _begin_group(self) -> None:
        self.made: list[list[list[torch.Tensor]]] = [[] for _ in self.stages]
        self.counts: list[int] = []

    def _compute(self, number: int, values: torch.Tensor, targets: torch.Tensor) -> None:
        for place, stage in enumerate(self.stages):
            self._put(stage, self.weights[place][self.version(place, number)])
            updated = max(0, number - self.lags[place]) // self.every
            for buffer, value in zip(stage.buffers(), self.buffers[place][updated], strict=True):
                buffer.copy_(value)
            values = stage(values)
            self.made[place].append(self._buffers(place))
        if self.newest:
            for place, stage in enumerate(self.stages):
                for parameter, value in zip(stage.parameters(), self.weights[place][-1], strict=True):
                    parameter.data.copy_(value)  # in the memory that the forward pass used, as an update is
        self.counts.append(len(targets))
        (functional.cross_entropy(values, targets) * len(targets)).backward()

    def _update(self) -> None:
        for place, stage in enumerate(self.stages):
            self._put(stage, self.weights[place][-1])
        if self.borrower:
            gradient, other = self._owned().grad, self._borrowed().grad
            assert gradient is not None and other is not None
            gradient += other
            self._borrowed().grad = None
        for place, (stage, optimizer) in enumerate(zip(self.stages, self.optimizers, strict=True)):
            for parameter in stage.parameters():
                if parameter.grad is not None:
                    parameter.grad /= sum(self.counts)
            optimizer.step()
            optimizer.zero_grad()
            self.weights[place].append(self._weights(place))
            means = [
                torch.stack([count * value.double() for count, value in zip(self.counts, values, strict=True)]).sum(0)
                / sum(self.counts)
                for values in zip(*self.made[place], strict=True)
            ]
            for buffer, mean in zip(stage.buffers(), means, strict=True):
                buffer.copy_(mean if buffer.is_floating_point() else mean.round())
            self.buffers[place].append(self._buffers(place))
        if self.borrower:
            now = len(self.weights[0]) - 1
            name = [one is self._borrowed() for one in self.stages[self.borrower].parameters()].index(True)
            self.weights[self.borrower][now][name] = self.weights[0][max(0, now - self.late)][0]
        self._begin_group()

    def _owned(self) -> nn.Parameter:
        return next(self.stages[0].parameters())

    def _borrowed(self) -> nn.Parameter:
        return next(one.weight for one in self.stages[self.borrower] if isinstance(one, Back))

    def _weights(self, place: int) -> list[torch.Tensor]:
        return [value.detach().clone() for value in self.stages[place].parameters()]

    def _buffers(self, place: int) -> list[torch.Tensor]:
        return [value.clone() for value in self.stages[place].buffers()]

    def _put(self, stage: nn.Module, values: Sequence[torch.Tensor]) -> None:
        for parameter, value in zip(stage.parameters(), values, strict=True):
            parameter.data = value.clone()

    def farthest_from(self, model: nn.Sequential) -> float:
        """The largest difference of any parameter or buffer."""
        for place, stage in enumerate(self.stages):
            self._put(stage, self._weights(place) if self.borrower else self.weights[place][-1])
        ours = [value for stage in self.stages for value in (*stage.state_dict().values(),)]
        theirs = list(model.state_dict().values())
        return max((one - other).abs().max().item() for one, other in zip(ours, theirs, strict=True))


def arguments(model: nn.Sequential, length: int, batch: int, count: int, **pipeline: Any) -> Arguments:
    return {
        "model": model,
        "optimizer": lambda values: torch.optim.SGD(values, lr=0.1, momentum=0.9),
        "loss": functional.cross_entropy,
        "data": data(length),
        "batch": batch,
        "microbatches": count,
        "strategy": "pipeline",
        "pipeline": pipeline,
        "timeout_seconds": 30,
    }


def trained(model: nn.Sequential, length: int, batch: int, count: int, steps: int, **pipeline: Any) -> paceline.Session:
    session = paceline.start(**arguments(model, length, batch, count, **pipeline))
    for one in session.batches(steps=steps):
        session.step(one)
    return session
