"""Tracking of script changes between steps: weights, buffers, plain attributes of modules and data, learning rates.

::

    step 4 returns           the loop body of step 4             step 5 begins
    ├ end_step: copies       teacher.update(), model.p = 0.5     ├ record_changes
    └ what is saved or sent                                      └ sent to a worker that begins with step 5

A checkpoint, and a worker that joins during the loop body of a step, get the state with which that step returned. The
script receives the batch of that step again, and runs the loop body itself. A worker that joins after all workers have
begun the next step gets the state of that time, and starts with that step.

Saved values are tensors of the model, tensors and arrays of up to 64 MiB, numbers, text, flags, and tuples of these.
For other values (functions, modules, hooks, lists) only the fact of a change is saved. A worker that continues from the
state warns about it if its own script does not make the change, too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.data.objects.attributes import PLAIN
from paceline.data.objects.forward_values import ForwardValues
from paceline.data.objects.outside import OutsideParameters
from paceline.data.objects.values import (
    OF_MODULES,
    OF_TORCH,
    Mark,
    ObjectValues,
    Owner,
    fitted,
    is_array,
    is_small,
    put_into,
    sent,
    versions_of,
)
from paceline.system.torch_internals import own_buffers, version_of

_NOT_RESTORED = (
    "The loop changed {names} in a completed step. The change is not kept: a worker that joins, and a resumed run, "
    "continue with the script's initial value. Set it again before each step, or keep numbers by session.register."
)
_NO_EFFECT = (
    "The loop changed the gradients after session.step of step {step}, as clip_grad_norm_ or backward() does. This has "
    "no effect: session.step has made the update. To clip, give clip_norm=... to paceline.start (report.gradient_norm "
    "is the norm before it), and leave backward() out of the loop."
)
_MODES = "the modes of the modules"
_WATCHED = 3
"""Number of steps after which gradients are compared: a loop that changes gradients does so in each step."""


class LoopChanges:
    """Tracker of the values that the loop body changes, with copies from when the last step returned.

    The session wraps its own changes in :meth:`not_watched`. A tensor changed by a plain operation is found at once. A
    change through ``.data`` is found when the digests of all tensors are compared, after steps 0, 1, 2, 4, 8 and so on.
    From then on the tensor is copied after each step.

    Args:
        model: model of the run.
        optimizer: optimizer of the model.
        digests: function that returns a number for the bits of each tensor. With None, bits are not compared.
        owners: mappings of values in the model, the loss and the data, by name (``data.objects.attributes``).
        keeps: whether a checkpoint gets the copies instead of the current tensors and hyperparameters.
        objects: objects among the owners whose attributes a forward pass may set, by the same names.
        outside: parameters that the model does not have.

    Attributes:
        now: whether :meth:`tensors` and :meth:`state` return current values, because all workers have begun a new step.
        changed: names of the values that the loop has changed, in the order of detection.
        said: last text that :meth:`not_restored` has returned; empty if none.
        forward_values: detector of reads of values that forward passes set.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        digests: Callable[[Sequence[torch.Tensor]], list[int]] | None,
        owners: Mapping[str, MutableMapping[Any, Any]],
        keeps: bool,
        objects: Mapping[str, object] = MappingProxyType({}),
        outside: OutsideParameters | None = None,
    ) -> None:
        self.now = False
        self.forward_values = ForwardValues(objects)
        self.outside = outside or OutsideParameters()
        self.changed: dict[str, None] = {}
        self.said = ""
        self._optimizer, self._digests_of, self._keeps = optimizer, digests, keeps
        self._owners = [
            Owner(name, entries) for name, entries in owners.items() if name.rpartition(".")[2] not in OF_TORCH
        ]
        self._values = ObjectValues(self._owners)
        self._first = {
            f"{owner.name}.{key}": ref(value)
            for owner in self._owners
            for key, value in owner.entries.items()
            if is_array(value)
        }
        self._arrays: dict[str, tuple[Owner, Any]] = {}  # owner and key of each tensor or array that the loop changes
        self._first_values: dict[str, tuple[Owner, Any, Any]] = {}  # owner, key and first value of changed attributes
        self._changes: dict[str, tuple[Owner | None, Any, Any]] = {}  # owner, key and value before, for take_changes
        self._modules = list(model.modules())
        self._modes: list[bool] = []
        self._large: dict[str, torch.Tensor] = {}  # copies of the large arrays from when the last step returned
        self._lost: dict[str, Mark] = {}  # marks, at load, of values whose change by the loop was not saved
        self._parameters = dict(model.named_parameters())
        self._buffers = [_place_of(model, name) for name, _ in model.named_buffers()]
        names = [f"buffer/{name}" for name, _ in model.named_buffers()]
        self._names = [*(f"parameter/{name}" for name in self._parameters), *names]
        self._versions: tuple[list[int], list[int]] = [], []  # identity and version of each tensor
        self._digests: list[int] = []
        self._kept: dict[str, torch.Tensor] = {}
        self._plain: list[dict[Any, Any]] = []  # values at the last refresh
        self._ended: list[dict[Any, Any]] = []  # values when the last step returned
        self._groups: list[dict[str, Any]] = []
        self._gradients: list[tuple[ref[torch.Tensor], int]] = []  # gradients and versions when the last step returned
        self._to_watch = _WATCHED if keeps else 0
        self._depth = 0
        self._none = torch.empty(0)

    def end_step(self, step: int) -> None:
        """Copy the values that the loop is known to change. Called when a step returns."""
        before = self._plain
        self.outside.end_step()
        self._keep()
        if before is not self._plain and len(before) == len(self._plain):
            for owner, then, values in zip(self._owners, before, self._plain, strict=True):
                if then is not values:
                    self.forward_values.find_changed(owner.name, then, values)
        self.forward_values.begin()
        if self._to_watch:
            self._gradients = [(ref(value), version_of(value)) for value in self._gradients_now()]
        if self._digests_of is not None and step & (step - 1) == 0:
            self._digests = self._digests_of(self._tensors())

    def _keep(self) -> None:
        self._digests = []
        self.refresh()
        self._ended = self._plain
        for name, value in self._large_arrays() if self._arrays else ():  # versions miss NumPy and .data
            if name not in self._large or not put_into(self._large[name], value):
                self._large[name] = value.clone()
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
        """Take the current values as the reference for the next :meth:`record_changes`."""
        tensors = self._tensors()
        self._versions = [*map(id, tensors)], versions_of(tensors)
        self._plain = self._values.values()
        self._modes = [one.training for one in self._modules]
        if self._digests and self._digests_of is not None:
            self._digests = self._digests_of(tensors)

    def record_changes(self, begins: bool = False) -> None:
        """Record what the script has changed since :meth:`refresh`. Set ``begins`` when the next step begins."""
        if begins:
            self.forward_values.close()
            self.outside.begin_step()
        if not self._ended:
            return
        versions, digests, plain, modes = self._versions, self._digests, self._plain, self._modes
        self.refresh()
        if versions != self._versions or digests != self._digests:
            before = zip(*versions, digests or versions[1], strict=True)
            now = zip(*self._versions, self._digests or self._versions[1], strict=True)
            found = [name for name, *pair in zip(self._names, before, now, strict=True) if pair[0] != pair[1]]
            self._changes.update((name, (None, 0, 1)) for name in found if name not in self.changed)
            self.changed.update(dict.fromkeys(found))
        if modes != self._modes:
            self._changes.setdefault(_MODES, (None, None, tuple(modes)))
        for owner, then, keys in self._differences(plain, self._plain):
            for key in keys:
                self._note(owner, key, then.get(key))
                self._changes.setdefault(f"{owner.name}.{key}", (owner, key, then.get(key)))
        if begins:
            self._digests = []

    def take_changes(self) -> dict[str, tuple[Hashable, Hashable]]:
        """Return the values before and after each change that the loop has made since the last call, by name.

        A value that is not a number, a text or a flag is a new object after each change. Of tensors of the model, only
        the first change is returned: a copy of the model may follow it in each step.
        """
        taken, self._changes = self._changes, {}
        found: dict[str, tuple[Hashable, Hashable]] = {}
        for name, (owner, key, before) in taken.items():
            if owner is not None:
                found[name] = _hashable(before), _hashable(owner.entries.get(key))
            else:
                found[name] = before, tuple(self._modes) if name == _MODES else object()
        return {name: (before, now) for name, (before, now) in found.items() if before != now}

    def _note(self, owner: Owner, key: Any, before: Any) -> None:
        """Record that the loop changes an entry, with its value before the change."""
        name = f"{owner.name}.{key}"
        self.changed[name] = None
        self._first_values.setdefault(name, (owner, key, before))
        if is_array(owner.entries.get(key)):
            self._arrays[name] = owner, key

    def _large_arrays(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors and arrays that the loop changes. Small ones are left out: their values are copies."""
        for name, (owner, key) in self._arrays.items():
            value = owner.entries.get(key)
            if is_array(value) and not is_small(value):
                yield name, torch.as_tensor(value).detach()

    def _differences(
        self, before: list[dict[Any, Any]], after: list[dict[Any, Any]]
    ) -> Iterator[tuple[Owner, dict[Any, Any], list[Any]]]:
        """Yield each owner whose values have changed, with the values before and the changed keys."""
        if before is after or len(before) != len(after):
            return
        for owner, then, values in zip(self._owners, before, after, strict=True):
            if then is not values and then != values:
                yield owner, then, [key for key in then | values if then.get(key) != values.get(key)]

    @contextmanager
    def noting_forward(self) -> Iterator[None]:
        """Record the attributes that a probe of the forward pass sets in this context."""
        before = [owner.values() for owner in self._owners]
        yield
        for owner, _, keys in self._differences(before, [owner.values() for owner in self._owners]):
            self.forward_values.find_left(owner.name, keys)

    def without_effect(self, step: int) -> str:
        """Return a warning, once, if the loop has changed gradients after the step before ``step``; else ''."""
        if not self._to_watch or not self._gradients:
            return ""
        before, self._gradients = self._gradients, []
        now = [value for held, version in before if (value := held()) is not None and version_of(value) > version]
        gradients = {id(value) for value in self._gradients_now()}
        changed = any(bool(value.any()) for value in now if id(value) in gradients)  # zero_grad() is harmless
        self._to_watch = 0 if changed else self._to_watch - 1
        return _NO_EFFECT.format(step=step - 1) if changed else ""

    def _gradients_now(self) -> list[torch.Tensor]:
        gradients = [value.grad for value in self._parameters.values()]
        return [value for value in gradients if value is not None and not value.is_sparse]

    @contextmanager
    def not_watched(self) -> Iterator[None]:
        """Ignore changes in this context, in which the session itself changes values."""
        if not self._depth:
            self.record_changes()
            self.forward_values.close()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.refresh()
                self.forward_values.open()

    @property
    def parameter(self) -> str:
        """Name of the first parameter that the loop has changed; empty if there is none."""
        return next((name.partition("/")[2] for name in self.changed if name.startswith("parameter/")), "")

    @property
    def needed(self) -> list[str]:
        """Names of values of model and data that the loop has changed. Steps without the script would miss them."""
        kept = [name for name, value in self._named(self._plain) if self._is_kept(name, value) or name in self._arrays]
        tensors = [name for name in self._names if name in self.changed]
        return [*tensors, *(name for name in kept if name.startswith(("model", "data", "collate", "sampler")))]

    @property
    def lacks_copies(self) -> bool:
        """Whether the loop has changed a tensor for the first time, so that no copy from before the change exists."""
        if not self._keeps or not self.changed:
            return False
        return any(name in self.changed and name not in self._kept for name in self._names)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of the tensors that the loop changes, by name. Empty if :attr:`now` is set."""
        return {} if self.now else self._kept

    def state(self, step: int) -> dict[str, Any]:
        """Return changed attributes and hyperparameters, for a checkpoint or another worker."""
        changed = self.attributes() if self.now or not self._ended else self._changed_of(self._ended)
        large = dict(self._large_arrays())
        if not self.now:
            large = {name: value for name, value in self._large.items() if name in large}
        for name, value in large.items():
            owner, key = self._arrays[name]
            changed.setdefault(owner.name, {})[key] = value
        marks = [name for name, value in self._named(self._plain) if isinstance(value, Mark)]
        return {
            "attributes": changed,
            "groups": [] if self.now else self._groups,
            "changed": list(self.changed),
            "lost": [name for name in marks if name in self.changed and name not in large],
            "in_place": [name for name, (owner, key) in self._arrays.items() if self._is_first(name, owner, key)],
            "left": list(self.forward_values.left),
        }

    def _is_first(self, name: str, owner: Owner, key: Any) -> bool:
        """Return whether a tensor or array is still the object of the start, which the script may hold elsewhere."""
        return name in self._first and self._first[name]() is owner.entries.get(key)

    def not_restored(self) -> str:
        """Return a warning, once, about changes that the loaded state lacks and this script has not made; else ''."""
        lost, self._lost = self._lost, {}
        now = dict(self._named(self._plain)) if lost else {}
        names = [_described(name) for name, mark in lost.items() if now.get(name) == mark]
        self.said = _NOT_RESTORED.format(names=", ".join(names[:3])) if names else self.said
        return self.said if names else ""

    def _named(self, values: list[dict[Any, Any]]) -> Iterator[tuple[str, Any]]:
        for owner, own in zip(self._owners, values, strict=False):  # no values before the first step
            yield from ((f"{owner.name}.{key}", value) for key, value in own.items())

    def attributes(self) -> dict[str, dict[Any, Any]]:
        """Return the current values of the attributes that the loop changes."""
        return self._changed_of([owner.values() for owner in self._owners])

    def set_apart(self) -> tuple[str, ...]:
        """Return the numbers, texts and flags that the loop has set and not set back. Sorted, to compare ranks."""
        values = ((name, owner.entries.get(key), first) for name, (owner, key, first) in self._first_values.items())
        return tuple(
            sorted(
                f"{name} = {value!r}"
                for name, value, first in values
                if (value is None or type(value) in PLAIN) and (type(value) is not type(first) or value != first)
            )
        )

    def _changed_of(self, values: list[dict[Any, Any]]) -> dict[str, dict[Any, Any]]:
        return {
            owner.name: found
            for owner, own in zip(self._owners, values, strict=True)
            if (
                found := {key: sent(value) for key, value in own.items() if self._is_kept(f"{owner.name}.{key}", value)}
            )
        }

    def _is_kept(self, name: str, value: Any) -> bool:
        return name in self.changed and not isinstance(value, Mark)

    def load(self, state: dict[str, Any]) -> None:
        """Load a state that :meth:`state` returned. Call this after loading the tensors."""
        for owner in self._owners:
            for key, value in state["attributes"].get(owner.name, {}).items():
                now = owner.entries.get(key)
                if f"{owner.name}.{key}" not in state.get("in_place", ()) or not put_into(now, value):
                    owner.entries[key] = fitted(value, now)
                self._note(owner, key, now)
        for group, values in zip(self._optimizer.param_groups, state["groups"], strict=False):
            group.update(values)
        self.changed.update(dict.fromkeys(state["changed"]))
        self.forward_values.load(state.get("left", ()))
        self._keep()
        marks = {name: value for name, value in self._named(self._plain) if isinstance(value, Mark)}
        self._lost = {name: marks[name] for name in state.get("lost", ()) if name in marks}

    def _tensors(self) -> list[torch.Tensor]:
        buffers = (buffers.get(key) for buffers, key in self._buffers)
        return [*self._parameters.values(), *(self._none if value is None else value for value in buffers)]


def _hashable(value: Any) -> Hashable:
    return (type(value), value) if value is None or type(value) in PLAIN else object()


def _described(name: str) -> str:
    owner, _, key = name.rpartition(".")
    return f"the {key.strip('_').replace('_', ' ')} of {owner}" if key in OF_MODULES else name


def _place_of(model: nn.Module, name: str) -> tuple[dict[str, torch.Tensor | None], str]:
    path, _, key = name.rpartition(".")
    return own_buffers(model.get_submodule(path)), key


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if type(value) in (*PLAIN, tuple)}
