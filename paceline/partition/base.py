"""What a cut model is made of: layers, and stages that run some of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

Crossing = tuple[torch.Tensor, ...]
"""The tensors that cross a boundary between two stages."""


class Stage(ABC):
    """Some neighbouring layers of a model; it computes with the model's own parameters and buffers.

    The first stage is called with the input of the model, any other with what the one before it returned: a flat
    tuple of tensors. The last one returns what the model returns. The caller may detach the tensors in between, and
    let them require a gradient where they are floating-point numbers.

    ``parameters``, ``buffers``: the names, in the model, of those it computes with.
    """

    parameters: list[str]
    buffers: list[str]

    @abstractmethod
    def __call__(self, values: Any) -> Any:
        """The output of the last layer of the stage."""


class Layers(ABC):
    """A model as a sequence of layers. It may be cut between any two of them.

    ``names``: of the layers, in the order in which they compute, as in ``model.named_modules()``.
    """

    names: list[str]

    @abstractmethod
    def stage(self, begin: int, end: int) -> Stage:
        """The layers from ``begin`` to ``end - 1``."""

    @property
    def known(self) -> bool:
        """Whether stages can run the model as it is now: its modules may have gone from training to evaluation."""
        return True

    def learn(self) -> None:  # noqa: B027 - for layers that are not always known
        """Get to know the model as it is now; all its parameters must be there."""


def unopened(values: Any) -> str | None:
    """What to do about a dataclass among the values, which torch takes for one value without tensors."""
    for leaf in tree_leaves(values):
        if is_dataclass(leaf):
            name = type(leaf).__name__
            return (
                f"{name} is a dataclass that torch does not know: register it before paceline.start with "
                f"torch.export.register_dataclass({name}), or use a tuple or a dict."
            )
    return None


def names_of(model: nn.Module) -> dict[int, str]:
    """The one name of each parameter and buffer, by the identity of the tensor."""
    found: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found.setdefault(id(tensor), name)
    return found


def named(tensors: Iterable[torch.Tensor], names: dict[int, str]) -> list[str]:
    """The names of some of the tensors, each once, in the order of the model."""
    wanted = {id(tensor) for tensor in tensors}
    return [name for place, name in names.items() if place in wanted]
