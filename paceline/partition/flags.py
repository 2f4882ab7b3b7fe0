"""Flags that a script may change between steps: ``training`` of modules, ``requires_grad`` of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

FlagValues = tuple[bool, ...]


class Flags:
    """Boolean attribute of several objects."""

    def __init__(self, objects: Iterable[Any], attribute: str) -> None:
        self._objects = list(objects)
        self._attribute = attribute
        self.saved = self.current()  # values when the model was last run

    def current(self) -> FlagValues:
        return tuple([getattr(one, self._attribute) for one in self._objects])

    def save(self) -> None:
        self.saved = self.current()

    @property
    def changed(self) -> bool:
        """Whether the current values differ from the saved ones."""
        return self.current() != self.saved

    @contextmanager
    def set_to(self, values: FlagValues) -> Iterator[None]:
        """Set the flags inside the context, and restore them on exit."""
        before = self.current()
        self._assign(values)
        try:
            yield
        finally:
            self._assign(before)

    def _assign(self, values: FlagValues) -> None:
        for one, value in zip(self._objects, values, strict=True):
            setattr(one, self._attribute, value)


def training_flags(model: nn.Module) -> Flags:
    return Flags(model.modules(), "training")


def requires_grad_flags(parameters: Iterable[nn.Parameter]) -> Flags:
    return Flags(parameters, "requires_grad")
