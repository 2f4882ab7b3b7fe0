"""The parameters of a model: those that come after the start are in no optimizer, so nobody would train them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import is_

from torch import nn

from paceline.errors import InputError


class Structure:
    """The modules and parameters of a model, and which of them are not trained.

    Args:
        model: as it is at the start.
        frozen: its parameters that the optimizer does not have, by name.
    """

    def __init__(self, model: nn.Module, frozen: Mapping[str, nn.Parameter]) -> None:
        self._model = model
        self._at_start = dict(model.named_parameters())
        self._trained = set(self._at_start.values()).difference(frozen.values())
        self._untrained = dict(frozen)
        self._remember()

    def check(self) -> None:
        """Refuse a parameter that requires a gradient, and that the optimizer did not get.

        A parameter of the start may go, or move to another place, and a module without parameters may be replaced.

        Raises:
            InputError: names it.
        """
        held = self._entries()
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            self._look_again()
        for name, value in self._untrained.items():
            if value.requires_grad:
                raise self._refused(name, value)

    def _entries(self) -> list[object]:
        """The parameters and submodules of all modules."""
        return [*chain.from_iterable(map(dict.values, self._dictionaries))]

    def _remember(self) -> None:
        found = (vars(one).get(key) for one in self._model.modules() for key in ("_parameters", "_modules"))
        self._dictionaries = [one for one in found if isinstance(one, dict)]  # a TorchScript module has others
        self._held = self._entries()

    def _look_again(self) -> None:
        """Something was replaced, added or removed."""
        named = self._model.named_parameters()
        self._untrained = {name: value for name, value in named if value not in self._trained}
        self._remember()

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
