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

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.data.attributes import PLAIN

_OF_TORCH = ("training", "_is_full_backward_hook")


class LoopChanges:
    """Finds out what the loop body changes, and keeps that as it was when the last step returned.

    :meth:`not_watched` is around whatever the session does itself. A tensor that is changed by a plain operation is
    found at once; one that is changed through ``.data`` where the digests of all are compared, which is behind steps 0,
    1, 2, 4, 8 and so on. From then on it is copied after each step.

    Args:
        model: the model.
        optimizer: its optimizer.
        digests: returns for each tensor a number that stands for its bits; None: these are not compared.
        data: the attributes of the data set and of the objects in it, by their names.
        keeps: whether a checkpoint gets what was kept, and not the tensors and hyperparameters of now.

    Attributes:
        now: whether :meth:`tensors` and :meth:`state` are those of now, as all workers have begun the next step.
        changed: the names of what the loop has changed, in the order in which that was found.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        digests: Callable[[Sequence[torch.Tensor]], list[int]] | None,
        data: Mapping[str, MutableMapping[Any, Any]],
        keeps: bool,
    ) -> None:
        self.now = False
        self.changed: dict[str, None] = {}
        self._optimizer = optimizer
        self._digests_of = digests
        self._keeps = keeps
        named = [(f"model.{name}" if name else "model", vars(module)) for name, module in model.named_modules()]
        self._owners = [_Owner(name, entries) for name, entries in [*named, *data.items()]]
        self._parameters = dict(model.named_parameters())
        self._buffers = [_place_of(model, name) for name, _ in model.named_buffers()]
        names = [f"buffer/{name}" for name, _ in model.named_buffers()]
        self._names = [*(f"parameter/{name}" for name in self._parameters), *names]
        self._versions: list[tuple[int, int]] = []
        self._digests: list[int] = []
        self._kept: dict[str, torch.Tensor] = {}
        self._plain: list[dict[Any, Any]] = []  # now
        self._ended: list[dict[Any, Any]] = []  # when the last step returned
        self._groups: list[dict[str, Any]] = []
        self._depth = 0
        self._none = torch.empty(0)

    def end_step(self, step: int) -> None:
        """Copy what the loop is known to change; the step returns."""
        self._keep()
        if self._digests_of is not None and step & (step - 1) == 0:
            self._digests = self._digests_of(self._tensors())

    def _keep(self) -> None:
        self._digests = []
        self.refresh()
        self._ended = self._plain
        if not self._keeps:
            return
        self._groups = [_hyperparameters(group) for group in self._optimizer.param_groups]
        for name, value in zip(self._names, self._tensors(), strict=True) if self.changed else ():
            if name in self.changed:
                kept = self._kept.get(name)
                if kept is None or (kept.shape, kept.dtype, kept.device) != (value.shape, value.dtype, value.device):
                    self._kept[name] = value.detach().clone()
                else:
                    kept.copy_(value.detach())

    def refresh(self) -> None:
        """Take everything as it is for unchanged."""
        tensors = self._tensors()
        self._versions = [(id(value), value._version) for value in tensors]
        self._plain = [owner.values() for owner in self._owners]
        if self._digests and self._digests_of is not None:
            self._digests = self._digests_of(tensors)

    def look(self, begins: bool = False) -> None:
        """Find what the script has changed since :meth:`refresh`; ``begins``: the next step does."""
        if not self._ended:
            return
        versions, digests, plain = self._versions, self._digests, self._plain
        self.refresh()
        if versions != self._versions or digests != self._digests:
            before = zip(versions, digests or versions, strict=True)
            now = zip(self._versions, self._digests or self._versions, strict=True)
            found = [name for name, *pair in zip(self._names, before, now, strict=True) if pair[0] != pair[1]]
            self.changed.update(dict.fromkeys(found))
        for owner, then, values in zip(self._owners, plain, self._plain, strict=True):
            if then != values:
                keys = [key for key in then | values if then.get(key) != values.get(key)]
                self.changed.update((f"{owner.name}.{key}", None) for key in keys)
        if begins:
            self._digests = []

    @contextmanager
    def not_watched(self) -> Iterator[None]:
        """In which the session itself changes things."""
        if not self._depth:
            self.look()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.refresh()

    @property
    def parameter(self) -> str:
        """The name of a parameter that the loop has changed; empty if there is none."""
        return next((name.partition("/")[2] for name in self.changed if name.startswith("parameter/")), "")

    @property
    def lacks_copies(self) -> bool:
        """Whether the loop has changed a tensor for the first time, so that nobody has it as it was before."""
        return self._keeps and any(name in self.changed and name not in self._kept for name in self._names)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the loop changes, by name, where they are to replace those of now."""
        return {} if self.now else self._kept

    def state(self, step: int) -> dict[str, Any]:
        """Return attributes and hyperparameters, for a checkpoint or another worker."""
        changed = self.attributes() if self.now or not self._ended else self._changed_of(self._ended)
        return {"attributes": changed, "groups": [] if self.now else self._groups, "changed": list(self.changed)}

    def attributes(self) -> dict[str, dict[Any, Any]]:
        """Return the attributes that the loop changes, as they are now."""
        return self._changed_of([owner.values() for owner in self._owners])

    def _changed_of(self, values: list[dict[Any, Any]]) -> dict[str, dict[Any, Any]]:
        return {
            owner.name: found
            for owner, own in zip(self._owners, values, strict=True)
            if (found := {key: value for key, value in own.items() if f"{owner.name}.{key}" in self.changed})
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` returned, after the tensors."""
        for owner in self._owners:
            owner.entries.update(state["attributes"].get(owner.name, {}))
        for group, values in zip(self._optimizer.param_groups, state["groups"], strict=False):
            group.update(values)
        self.changed.update(dict.fromkeys(state["changed"]))
        self._keep()

    def _tensors(self) -> list[torch.Tensor]:
        buffers = (buffers.get(key) for buffers, key in self._buffers)
        return [*self._parameters.values(), *(self._none if value is None else value for value in buffers)]


class _Owner:
    """The plain attributes of one object."""

    def __init__(self, name: str, entries: MutableMapping[Any, Any]) -> None:
        self.name, self.entries = name, entries
        self._keys: list[Any] = []
        self._size = -1

    def values(self) -> dict[Any, Any]:
        """Return them; which ones may be plain is looked at again when there are more or fewer."""
        entries = self.entries
        if len(entries) != self._size:
            self._size = len(entries)
            self._keys = [
                key for key, one in entries.items() if (one is None or type(one) in PLAIN) and key not in _OF_TORCH
            ]
        return {key: value for key in self._keys if type(value := entries.get(key)) in PLAIN}


def _place_of(model: nn.Module, name: str) -> tuple[dict[str, torch.Tensor | None], str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path)._buffers, key


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if type(value) in (*PLAIN, tuple)}
