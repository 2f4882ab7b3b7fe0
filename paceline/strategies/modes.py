"""Which modules of a model train, and which are in evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

Mode = tuple[bool, ...]
"""For each module of a model, in the order of ``modules()``, whether it trains."""


class Modes:
    """The mode of a model.

    Attributes:
        last: the mode in which it was run last.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self.last = self.now()

    def now(self) -> Mode:
        """The mode that the model has."""
        return tuple([module.training for module in self._modules])

    def note(self) -> None:
        """The model is run as it is now."""
        self.last = self.now()

    @property
    def changed(self) -> bool:
        """Whether the model has another mode than when it was run last."""
        return self.now() != self.last

    @contextmanager
    def being(self, mode: Mode) -> Iterator[None]:
        """Within this the model has another mode."""
        before = self.now()
        self._go_to(mode)
        try:
            yield
        finally:
            self._go_to(before)

    def _go_to(self, mode: Mode) -> None:
        for module, training in zip(self._modules, mode, strict=True):
            module.training = training
