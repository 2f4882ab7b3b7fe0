"""Structure of a model: parameters and buffers that are added, removed or renamed after the start.

A parameter that is added after the start belongs to no optimizer, so it would not be trained. A checkpoint with other
names than at the start does not fit the model that a resumed script or a joiner builds.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from operator import is_

import torch
from torch import nn

from paceline.errors import InputError
from paceline.system.torch_internals import BUFFERS, MODULES, PARAMETERS

_is_none = partial(is_, None)
_OTHER_NAMES = (
    "The {kind} {name!r} {happened} after paceline.start. A checkpoint, and the state that a joining worker gets, "
    "would not fit the model with which the script begins, so no run could continue from it. {cure}; change values, "
    "not names, in the loop."
)
_PRUNE_BEFORE = (
    "Call torch.nn.utils.prune.identity(module, {name!r}) before paceline.start, which makes the mask, and prune in "
    "the loop as now"
)
_BUILD_BEFORE = "Give the model all its layers, parametrizations and buffers before paceline.start"


class Structure:
    """Modules, parameters and buffers of a model, and which of the parameters are not trained.

    Args:
        frozen: the model's parameters that the optimizer does not have, by name.
    """

    def __init__(self, model: nn.Module, frozen: Mapping[str, nn.Parameter]) -> None:
        self._model = model
        self._at_start = dict(model.named_parameters())
        self._trained = set(self._at_start.values()).difference(frozen.values())
        self._untrained = dict(frozen)
        self._buffers_at_start = dict.fromkeys(name for name, _ in model.named_buffers())
        # message about a parameter or buffer added or removed since the start. Empty if there is none.
        self.changed = ""
        self._remember()

    def check(self) -> None:
        """Raise InputError if a parameter requires a gradient that the optimizer did not get.

        A parameter of the start may be removed or move to another module. A module without parameters may be replaced.
        """
        self.update()
        for name, value in self._untrained.items():
            if value.requires_grad:
                raise self._refused(name, value)

    def update(self) -> str:
        """Find what was replaced, added or removed, and return :attr:`changed`."""
        held = self._entries()
        same = len(held) == len(self._held) and all(map(is_, held, self._held))
        if not same or any(self._empty) or self._names() != self._known_names:
            self._check_again()
        return self.changed

    def _entries(self) -> list[object]:
        """Return the parameters and submodules of all modules."""
        return [*chain.from_iterable(map(dict.values, self._dictionaries))]

    def _names(self) -> list[object]:
        """Return the names of the parameters and buffers in all modules, and which buffers are None."""
        return [*chain.from_iterable(self._named), *map(_is_none, chain.from_iterable(map(dict.values, self._buffers)))]

    def _remember(self) -> None:
        parameters, modules, self._buffers = map(self._found, (PARAMETERS, MODULES, BUFFERS))
        self._empty = [one for one in (*parameters, *modules, *self._buffers) if not one]  # most stay empty
        parameters, self._buffers = [*filter(None, parameters)], [*filter(None, self._buffers)]
        self._dictionaries = [*parameters, *filter(None, modules)]
        self._named = [*parameters, *self._buffers]
        self._held, self._known_names = self._entries(), self._names()

    def _found(self, kind: str) -> list[dict[str, object]]:
        found = (vars(one).get(kind) for one in self._model.modules())
        return [one for one in found if isinstance(one, dict)]  # not in TorchScript modules

    def _check_again(self) -> None:
        named = self._model.named_parameters()
        self._untrained = {name: value for name, value in named if value not in self._trained}
        self.changed = self._change()
        self._remember()

    def _change(self) -> str:
        """Describe the first parameter or buffer that was added or removed."""
        parameters, buffers = dict(self._model.named_parameters()), dict(self._model.named_buffers())
        kind, (name, happened) = "parameter", _difference(self._at_start, parameters)
        if not name:
            kind, (name, happened) = "buffer", _difference(self._buffers_at_start, buffers)
        if not name:
            return ""
        key = name.rpartition(".")[2]
        beside = name.removesuffix(key)
        pruned = f"{beside}{key}_mask" in buffers and f"{beside}{key}_orig" in parameters
        cure = _PRUNE_BEFORE.format(name=key) if pruned else _BUILD_BEFORE
        return _OTHER_NAMES.format(kind=kind, name=name, happened=happened, cure=cure)

    def _refused(self, name: str, value: nn.Parameter) -> InputError:
        if value is self._at_start.get(name):
            return InputError(
                f"The parameter {name!r} was frozen at the start and requires a gradient now, but the optimizer "
                f"does not have it. A factory gets frozen ones too if its parameter is called model: "
                f"lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4)."
            )
        happened = "replaced" if name in self._at_start else "added"
        return InputError(
            f"The parameter {name!r} was {happened} after paceline.start, and only those of the start are trained. "
            f"Build the whole model before paceline.start, or call requires_grad_(False) on what is not to be trained."
        )


def _difference(before: Mapping[str, torch.Tensor | None], now: Mapping[str, torch.Tensor]) -> tuple[str, str]:
    """Return the first name that is in only one of two mappings and what happened to it, or two empty strings."""
    if before.keys() == now.keys():
        return "", ""
    other = {id(value): name for name, value in now.items()}
    for name, value in before.items():
        if name not in now:
            return name, f"became {other[id(value)]!r}" if id(value) in other else "was removed"
    return next(name for name in now if name not in before), "was added"
