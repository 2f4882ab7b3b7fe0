"""Weight stashing: older versions of a stage's weights, kept for the microbatches whose forward pass used them.

PipeDream, Harlap et al. 2018, arXiv 1806.03377. A version still in use keeps its memory when the weights are updated,
and the parameters get new memory. A backward pass must see the weights of its forward pass. Autograd checks that by the
version counters of parameters, so updates must not change these counters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from paceline.system.torch_internals import preserve_versions


class WeightStash:
    """Versions of the weights of a stage."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)
        self._older: dict[int, list[torch.Tensor]] = {}
        self.newest = 0  # number of updates in the newest version

    def __len__(self) -> int:
        return len(self._older) + 1

    @contextmanager
    def use(self, version: int) -> Iterator[None]:
        """Set the parameters to this version inside the context."""
        if version == self.newest:
            yield
            return
        now = [parameter.data for parameter in self._parameters]
        self._assign(self._older[version])
        try:
            yield
        finally:
            self._assign(now)

    @contextmanager
    def update(self, oldest: int) -> Iterator[None]:
        """Make the next version by in-place changes inside the context, and keep versions from ``oldest`` on."""
        for version in [version for version in self._older if version < oldest]:
            del self._older[version]
        if oldest <= self.newest:
            self._older[self.newest] = [parameter.data for parameter in self._parameters]
            self._assign([value.clone() for value in self._older[self.newest]])
        self.newest += 1
        with preserve_versions(self._parameters):
            yield

    def reset(self) -> None:
        """Drop all versions but the newest, and renumber it as 0."""
        self._older.clear()
        self.newest = 0

    def _assign(self, values: Sequence[torch.Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data = value
