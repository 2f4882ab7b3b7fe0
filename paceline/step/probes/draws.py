"""Recorded random numbers of a forward pass, replayed in later passes over some of its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.data.keys import torch_states
from paceline.data.nested import tensors_in
from paceline.system.torch_internals import TorchDispatchMode

Given = Callable[[torch.Tensor, torch.Size], "torch.Tensor | None"]
"""Returns random numbers of the first pass for a tensor of this shape in a later pass, or None if it cannot."""


class RecordedDraws(TorchDispatchMode):
    """Dispatch mode that records the random numbers of a first forward pass and replays them in later passes.

    Attributes:
        unknown: whether a later pass drew numbers that have no counterpart in the first pass.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unknown = False
        self._drawn: list[list[torch.Tensor]] = []
        self._number = 0
        self._first = True
        self._given: Given = lambda before, shape: None

    @contextmanager
    def pass_of(self, given: Given) -> Iterator[None]:
        """Run a forward pass in this context. The first pass is recorded, later passes get numbers from ``given``."""
        self._number, self._given = 0, given
        if self._first or self._drawn:
            with self:
                yield
            self._first = False
        else:  # the mode makes each operation slower
            before = torch_states()
            yield
            self.unknown |= not all(map(torch.equal, before, torch_states()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return result
        if self._first:
            self._drawn.append([tensor.clone() for tensor in tensors_in(result)])
        else:
            before = self._drawn[self._number] if self._number < len(self._drawn) else []
            found = tensors_in(result)
            self.unknown |= len(found) != len(before)
            for tensor, drawn in zip(found, before, strict=False):
                self._replace(tensor, self._given(drawn, tensor.shape))
        self._number += 1
        return result

    def _replace(self, tensor: torch.Tensor, given: torch.Tensor | None) -> None:
        if given is None:
            self.unknown = True
        else:
            tensor.copy_(given)
