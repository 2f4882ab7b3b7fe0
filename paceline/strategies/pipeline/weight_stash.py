"""Older versions of the weights of a stage, kept for the microbatches that started with them (weight stashing).

A version that is still needed keeps its memory when the weights are updated: the parameters then get memory of their
own. A backward pass must see the weights of its forward pass; torch's own check for that counts changes of a parameter,
which has to stay out of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


class WeightStash:
    """The weights of a stage, as many versions as are needed.

    Args:
        parameters: of the stage, as far as they are trained.

    Attributes:
        newest: how many updates the newest version contains.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)
        self._older: dict[int, list[torch.Tensor]] = {}
        self.newest = 0

    @property
    def kept(self) -> int:
        """How many versions there are."""
        return len(self._older) + 1

    @contextmanager
    def at(self, version: int) -> Iterator[None]:
        """The parameters have this version."""
        if version == self.newest:
            yield
            return
        now = [parameter.data for parameter in self._parameters]
        self._put(self._older[version])
        try:
            yield
        finally:
            self._put(now)

    @contextmanager
    def next(self, oldest: int) -> Iterator[None]:
        """Make the next version by changing the parameters in place; keep those from ``oldest`` on."""
        for version in [version for version in self._older if version < oldest]:
            del self._older[version]
        if oldest <= self.newest:
            self._older[self.newest] = [parameter.data for parameter in self._parameters]
            self._put([value.clone() for value in self._older[self.newest]])
        self.newest += 1
        with _unsafe_preserve_version_counter(self._parameters):
            yield

    def start_again(self) -> None:
        """Nothing is under way: count from here."""
        self._older.clear()
        self.newest = 0

    def _put(self, values: Sequence[torch.Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data = value
