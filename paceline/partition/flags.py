"""What a script may switch on and off between steps: the mode of each module, the training of each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Mode = tuple[bool, ...]
"""How some switches stand, in their order."""


class Switches:
    """Attributes that are true or false, one of each thing.

    Attributes:
        last: how they stood when the model was run last.
    """

    def __init__(self, things: Iterable[Any], attribute: str) -> None:
        self._things = list(things)
        self._attribute = attribute
        self.last = self.now()

    def now(self) -> Mode:
        """How they stand."""
        return tuple([getattr(thing, self._attribute) for thing in self._things])

    def note(self) -> None:
        """The model is run as it is now."""
        self.last = self.now()

    @property
    def changed(self) -> bool:
        """Whether they stand otherwise than when the model was run last."""
        return self.now() != self.last

    @contextmanager
    def being(self, mode: Mode) -> Iterator[None]:
        """Within this they stand otherwise."""
        before = self.now()
        self._go_to(mode)
        try:
            yield
        finally:
            self._go_to(before)

    def _go_to(self, mode: Mode) -> None:
        for thing, value in zip(self._things, mode, strict=True):
            setattr(thing, self._attribute, value)


class Flags(Switches):
    """Which modules of a model train, and which are in evaluation; in the order of ``modules()``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.modules(), "training")


class Freezing(Switches):
    """Which parameters are trained, and which are frozen."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, "requires_grad")
