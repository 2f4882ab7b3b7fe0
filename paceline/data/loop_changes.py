"""What the script changes between two steps: weights, buffers, plain attributes of modules and data, learning rates.

::

    step 4 returns           the loop body of step 4             step 5 begins
    ├ end_step: copies       teacher.update(), model.p = 0.5     ├ look: finds what was changed
    └ what is saved or sent                                      └ sent to a worker that begins with step 5

A checkpoint, and a worker that joins among the lines behind a step, get the state with which that step returned: their
script gets the batch of that step once more, and runs those lines itself. A worker that joins when all have begun the
next step gets the state of then, and begins with that step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.data.attributes import PLAIN

_OF_TORCH = ("training", "_is_full_backward_hook")


class LoopChanges:
    """Finds out what the loop body changes, and keeps that as it was when the last step returned.

    :meth:`look` is called before, and :meth:`refresh` after whatever the session does itself. A tensor that is changed
    by a plain operation is found at once; one that is changed through ``.data`` where the digests of all are compared,
    which is behind steps 0, 1, 2, 4, 8 and so on. From then on it is copied after each step.

    Args:
        model: the model.
        optimizer: its optimizer.
        digests: returns for each tensor a number that stands for its bits; None: these are not compared.
        data: the attributes of the data set and of the objects in it, by their names.

    Attributes:
        now: whether :meth:`tensors` and :meth:`state` are those of now, as all workers have begun the next step.
        changed: the names of what the loop has changed, tensors first.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        digests: Callable[[Sequence[torch.Tensor]], list[int]] | None,
        data: Mapping[str, dict[Any, Any]],
    ) -> None:
        self.now = False
        self.changed: list[str] = []
        self._optimizer = optimizer
        self._digests_of = digests
        modules = [(f"model.{name}" if name else "model", vars(module)) for name, module in model.named_modules()]
        self._owners = dict(modules) | dict(data)
        self._parameters = dict(model.named_parameters())
        self._buffers = [
            (f"{name}.{key}", module._buffers, key) for name, module in model.named_modules() for key in module._buffers
        ]
        self._versions: list[int] = []
        self._digests: list[int] = []
        self._kept: dict[str, torch.Tensor] = {}
        self._plain: dict[str, dict[Any, Any]] = {}  # now
        self._ended: dict[str, dict[Any, Any]] = {}  # when the last step returned
        self._groups: list[dict[str, Any]] = []

    def end_step(self, step: int) -> None:
        """Copy what the loop is known to change; the step returns."""
        tensors = self._tensors()
        for name, copied in self._kept.items():
            copied.copy_(tensors[name])
        if self._digests_of is not None and step & (step - 1) == 0:
            self._digests = self._digests_of([*tensors.values()])
        self.refresh()
        self._ended = self._plain
        self._groups = [_hyperparameters(group) for group in self._optimizer.param_groups]

    def refresh(self) -> None:
        """Take everything as it is for unchanged."""
        self._versions = [value._version for value in self._tensors().values()]
        self._plain = self._plain_values()

    def look(self) -> None:
        """Find what the script has changed since :meth:`refresh`."""
        if not self._ended:
            return
        tensors = self._tensors()
        digests = self._digests_of([*tensors.values()]) if self._digests_of is not None and self._digests else []
        for place, (name, value) in enumerate(tensors.items()):
            if (
                value._version != self._versions[place]
                or digests[place : place + 1] != self._digests[place : place + 1]
            ):
                self._note(name)
                if name not in self._kept:
                    self._kept[name] = value.detach().clone()
        self._digests = []
        now = self._plain_values()
        for owner, before in self._plain.items() if now != self._plain else ():
            for key in before | now[owner]:
                if before.get(key) != now[owner].get(key):
                    self._note(f"{owner}.{key}")

    def _note(self, name: str) -> None:
        if name not in self.changed:
            self.changed.append(name)

    @property
    def parameter(self) -> str:
        """The name of a parameter that the loop has changed; empty if there is none."""
        return next((name.partition("/")[2] for name in self.changed if name.startswith("parameter/")), "")

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the loop changes, by name, where they are to replace those of now."""
        return {} if self.now else self._kept

    def state(self, step: int) -> dict[str, Any]:
        """Return attributes and hyperparameters, for a checkpoint or another worker."""
        values = self._plain_values() if self.now or not self._ended else self._ended
        names = {*self.changed}
        changed = {
            owner: found
            for owner, own in values.items()
            if (found := {key: value for key, value in own.items() if f"{owner}.{key}" in names})
        }
        return {"attributes": changed, "groups": [] if self.now else self._groups, "changed": list(self.changed)}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` returned."""
        for owner, values in state["attributes"].items():
            self._owners.get(owner, {}).update(values)
        for group, values in zip(self._optimizer.param_groups, state["groups"], strict=False):
            group.update(values)
        for name in state["changed"]:
            self._note(name)
        self._ended = {}

    def _tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {f"parameter/{name}": value for name, value in self._parameters.items()}
        for name, buffers, key in self._buffers:
            if (value := buffers.get(key)) is not None:
                found[f"buffer/{name.removeprefix('.')}"] = value
        return found

    def _plain_values(self) -> dict[str, dict[Any, Any]]:
        return {
            name: {key: one for key, one in [*entries.items()] if type(one) in PLAIN and key not in _OF_TORCH}
            for name, entries in self._owners.items()
        }


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if type(value) in (*PLAIN, tuple)}
