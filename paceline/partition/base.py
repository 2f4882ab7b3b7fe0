"""Interfaces of a cut model: layers, and stages that each run some of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn

from paceline.system.torch_internals import tree_leaves

Activations = tuple[torch.Tensor, ...]  # tensors that one stage passes to the next


class Stage(ABC):
    """Consecutive layers of a model, which compute with the model's own parameters and buffers.

    The first stage takes the model's input, any other stage a flat tuple of tensors from the previous stage. The last
    stage returns the model's output. Between stages the caller may detach the tensors and make floating-point tensors
    require a gradient.

    ``parameters``, ``buffers``: names, in the model, of the parameters and buffers that the stage uses.
    """

    parameters: list[str]
    buffers: list[str]

    @abstractmethod
    def __call__(self, values: Any) -> Any:
        """Run the layers of the stage."""


class Layers(ABC):
    """Model as a sequence of layers. It may be cut between any two of them.

    ``names``: names of the layers in execution order, as in ``model.named_modules()``.
    """

    names: list[str]

    @abstractmethod
    def stage(self, begin: int, end: int) -> Stage:
        """Return the stage of the layers ``begin <= layer < end``."""

    @property
    def is_ready(self) -> bool:
        """Whether the stages can run the model in its current mode (``train()``, ``eval()``)."""
        return True

    def check(self) -> None:  # noqa: B027 - for layers that do not notice it when they are called
        """Raise if the script has changed the computation of the stages.

        Raises:
            InputError: names the layer.
        """

    def prepare(self) -> None:  # noqa: B027 - for layers that depend on the mode
        """Prepare for the model's current mode. This needs all parameters of the model."""


def dataclass_remedy(values: Any) -> str | None:
    """Return the remedy for a value that is a dataclass not registered with torch, which treats it as a leaf."""
    for leaf in tree_leaves(values):
        if is_dataclass(leaf):
            name = type(leaf).__name__
            return (
                f"{name} is a dataclass that is not registered with torch: call "
                f"torch.export.register_dataclass({name}) before paceline.start, or use a tuple or a dict."
            )
    return None


def tensor_names(model: nn.Module) -> dict[int, str]:
    names: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        names.setdefault(id(tensor), name)
    return names


def select_names(tensors: Iterable[torch.Tensor], names: dict[int, str]) -> list[str]:
    """Return the names of the tensors, without duplicates, in the order of the model."""
    wanted = {id(tensor) for tensor in tensors}
    return [name for key, name in names.items() if key in wanted]
