"""Values in objects: copies of plain values and small arrays, and marks that detect changes of other values."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from itertools import accumulate, chain, compress, islice
from operator import is_, is_not, methodcaller
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy
import torch
from torch import nn

from paceline.data.objects.attributes import PLAIN, Attributes, is_dense, same
from paceline.system.torch_internals import BUFFERS, HOOKS, MODULES, PARAMETERS, version_of, without_subclasses

OF_MODULES = {PARAMETERS, BUFFERS, MODULES, *HOOKS}
OF_TORCH = vars(nn.Module()).keys()
"""Attributes that torch itself keeps in each module. The loop may change those in ``OF_MODULES``."""
_MOST_SEEN = 1000
_MOST_OWNERS = 200
_SMALL_BYTES = 4096
_ABSENT = object()
_VALUES = methodcaller("values")
_MOST_BYTES = 1 << 26
"""Largest tensor or array that is saved when the loop changes it."""
Values: TypeAlias = list[dict[Any, Any]]
Array: TypeAlias = "torch.Tensor | numpy.ndarray[Any, Any]"


class PlainValues:
    """Plain values of objects and of the objects that they hold, with temporary restoration of earlier values.

    A script may change its data set in the loop, for example ``train_set.strength = step / 1000``. Microbatches that
    are loaded later in the step, because they were stolen, audited or left by a lost worker, must be read with the same
    values as the first microbatches.

    Args:
        objects: objects by name. They are searched for values once, by the constructor.

    Attributes:
        owners: mappings that hold the values, by name.

    >>> from types import SimpleNamespace
    >>> noisy = SimpleNamespace(strength=0.5)
    >>> values = PlainValues(data=noisy)
    >>> before = values.now()
    >>> noisy.strength = 0.75
    >>> with values.set_to(before):
    ...     print(noisy.strength)
    0.5
    >>> noisy.strength
    0.75
    """

    def __init__(self, **objects: Any) -> None:
        found = Attributes(objects, set(), copies=False)
        self.owners = dict(islice(found.owners.items(), _MOST_OWNERS))
        self._owners = list(self.owners.values())
        held = [(found.objects.get(name), owner) for name, owner in self.owners.items()]
        self._objects = [one if getattr(one, "__dict__", None) is owner else None for one, owner in held]

    def now(self) -> Values:
        """Return the current values: numbers, text, flags, None, and copies of small tensors and arrays."""
        return [{key: _copied(one) for key, one in [*owner.items()] if _is_restored(one)} for owner in self._owners]

    @contextmanager
    def set_to(self, values: Values) -> Iterator[None]:
        """Restore values that :meth:`now` returned for the duration of this context."""
        changed = []
        for owner, held_by, before in zip(self._owners, self._objects, values, strict=True):
            for key in _hidden(held_by, before):
                changed.append((owner, key, owner.pop(key)))
            for key, value in before.items():
                now = owner.get(key, _ABSENT)
                if _is_restored(now) and not same(now, value):
                    changed.append((owner, key, now))
                    owner[key] = value
        try:
            yield
        finally:
            for owner, key, now in changed:
                owner[key] = now


def _hidden(owner: object, before: dict[Any, Any]) -> list[str]:
    """Return the attributes of an object that hide plain values of its class, and did not when ``before`` was read.

    The loop has since set them, for example by ``train_set.strength = 0.5`` with ``strength = 0.0`` in the class.
    """
    added = [key for key, one in getattr(owner, "__dict__", {}).items() if key not in before and _is_restored(one)]
    return [key for key in added if _is_restored(getattr(type(owner), key, _ABSENT))]


def _is_restored(value: Any) -> bool:
    return value is None or type(value) in PLAIN or is_small(value)


def is_array(value: Any) -> TypeGuard[Array]:
    """Return whether a value is a tensor or an array of numbers that can be saved."""
    if isinstance(value, torch.Tensor):
        return is_dense(value) and value.nbytes <= _MOST_BYTES
    if not isinstance(value, numpy.ndarray) or value.dtype.kind not in "biufc" or value.nbytes > _MOST_BYTES:
        return False
    return value.dtype.isnative and min(value.strides, default=0) >= 0  # torch accepts no others


def versions_of(tensors: Collection[torch.Tensor]) -> list[int]:
    """Return the number of changes in place of each tensor.

    The override of a subclass, such as that of another stage's parameters, would take 50 times as long.
    """
    with without_subclasses():
        with suppress(RuntimeError):  # tensors from inference mode have no number
            return [*map(version_of, tensors)]
        return [0 if value.is_inference() else version_of(value) for value in tensors]


def put_into(now: Any, sent: Any) -> bool:
    """Copy a tensor from :func:`sent` into ``now``. Return False if ``now`` is not an array of this shape and dtype."""
    if not (is_array(now) and isinstance(sent, torch.Tensor)):
        return False
    tensor = torch.as_tensor(now)
    if (tensor.shape, tensor.dtype) != (sent.shape, sent.dtype):
        return False
    with torch.no_grad():
        tensor.copy_(sent)
    return True


def is_small(value: Any) -> bool:
    """Return whether a value is a tensor or an array small enough (4 KiB) to copy in each step."""
    return is_dense(value) and bool(value.nbytes <= _SMALL_BYTES)


def _copied(value: Any) -> Any:
    """Return a copy of a tensor or an array, and any other value itself."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, numpy.ndarray) else value


class _Copy:
    """Copy of a tensor or an array. Copies are equal if their contents are.

    Copies of one tensor on a device are equal if it was not changed in place, which spares the host a wait.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Array) -> None:
        self.value = _copied(value)
        self._origin = None
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            self._origin = id(value), *versions_of([value])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Copy):
            return False
        return (self._origin is not None and self._origin == other._origin) or same(self.value, other.value)


class Mark(NamedTuple):
    """Change marker of a value that is not saved: its identity and the identities of its contents."""

    held: tuple[Any, ...]


_EMPTY = Mark(())


class Owner:
    """Values of one object, read again only if they may have changed."""

    def __init__(self, name: str, entries: MutableMapping[Any, Any]) -> None:
        self.name, self.entries = name, entries
        self._held: list[Any] = []
        self._empty: list[Any] = []
        self._mutable: list[tuple[Any, Any, Any]] = []
        self._values: dict[Any, Any] = {}

    @property
    def dictionaries(self) -> list[tuple[Any, dict[Any, Any]]]:
        """Keys and values of the dictionaries that were not empty at the last :meth:`values`."""
        return [(key, value) for key, value, _ in self._mutable if isinstance(value, dict)]

    @property
    def empty(self) -> list[Any]:
        """Dictionaries that were empty at the last :meth:`values`."""
        return self._empty

    @property
    def is_mutable(self) -> bool:
        """Whether a value that is not a dictionary may change in place."""
        return any(not isinstance(one, dict) and seen != Mark((id(one),)) for _, one, seen in self._mutable)

    def values(self) -> dict[Any, Any]:
        """Return the saved values, and a mark for each other value. The dictionary is the same object if none changed.

        An immutable value that is the same object as before has not changed. The thousands of empty dictionaries in
        modules are only checked for being empty.
        """
        held = [*self.entries.values()]
        same_objects = len(held) == len(self._held) and all(map(is_, held, self._held)) and not any(self._empty)
        if same_objects and all(_seen(key, value) == seen for key, value, seen in self._mutable):
            return self._values
        found = {
            key: (value, _seen(key, value))
            for key, value in self.entries.items()
            if key in OF_MODULES or key not in OF_TORCH
        }
        self._held = held
        self._values = {key: seen for key, (_, seen) in found.items()}
        self._empty = [value for value, seen in found.values() if seen is _EMPTY]
        self._mutable = [
            (key, value, seen) for key, (value, seen) in found.items() if seen is not value and seen is not _EMPTY
        ]
        return self._values


class ObjectValues:
    """Values of many objects, compared together in loops that run in C. Only objects that differ are read again.

    An object that has changed together with a dictionary twice is compared by itself from then on, because the script
    may change a dictionary in each step. So is a mapping view, because its length says less than a dictionary's.
    """

    def __init__(self, owners: Sequence[Owner]) -> None:
        self._owners = owners
        self._alone = frozenset(index for index, owner in enumerate(owners) if type(owner.entries) is not dict)
        self._once: frozenset[int] = frozenset()
        self._values: list[dict[Any, Any]] = []

    def _watch(self) -> None:
        """Compare with the current values from now on."""
        self._together = [index for index in range(len(self._owners)) if index not in self._alone]
        owners = [self._owners[index] for index in self._together]
        nested = [one for owner in owners for one in owner.dictionaries]
        self._entries = [owner.entries for owner in owners]
        self._by_key = [value for key, value in nested if key != MODULES]
        self._by_value = [value for key, value in nested if key == MODULES]
        self._empty = [one for owner in owners for one in owner.empty]
        self._sized = [*self._entries, *self._by_key, *self._by_value]
        self._mutable = self._alone.union(index for index in self._together if self._owners[index].is_mutable)
        self._sizes, self._nested, self._objects = self._held()
        self._ends = [*accumulate(self._sizes[: len(owners)])]

    def values(self) -> list[dict[Any, Any]]:
        """Return the values of each object, see :meth:`Owner.values`. The list is the same object if none changed."""
        if not self._values:
            self._values = [owner.values() for owner in self._owners]
            self._watch()
        sizes, nested, objects = self._held()
        same_dictionaries = sizes == self._sizes and len(nested) == len(self._nested) and not any(self._empty)
        if not same_dictionaries or not all(map(is_, nested, self._nested)):
            return self._read_all()
        if not all(map(is_, objects, self._objects)):
            differing = [*compress(range(len(objects)), map(is_not, objects, self._objects))]
            if any(isinstance(self._objects[at], dict) for at in differing):
                return self._read_all()  # which also releases the dictionary
            owner_of = {at: self._together[bisect_right(self._ends, at)] for at in differing}
            self._mutable = self._mutable.union(owner_of[at] for at in differing if type(objects[at]) not in PLAIN)
            self._objects = objects
            self._read(self._mutable.union(owner_of.values()))
        else:
            self._read(self._mutable)
        return self._values

    def _held(self) -> tuple[list[int], list[Any], list[Any]]:
        """Return the sizes of the dictionaries, the keys or values in nested ones, and the values of the objects."""
        nested = [*chain.from_iterable(self._by_key), *chain.from_iterable(map(_VALUES, self._by_value))]
        return [*map(len, self._sized)], nested, [*chain.from_iterable(map(_VALUES, self._entries))]

    def _read(self, indices: Collection[int]) -> list[int]:
        """Read some objects again, and return the indices of those that have changed."""
        found = [(index, self._owners[index].values()) for index in indices]
        if found := [(index, values) for index, values in found if values is not self._values[index]]:
            self._values = [*self._values]
            for index, values in found:
                self._values[index] = values
        return [index for index, _ in found]

    def _read_all(self) -> list[dict[Any, Any]]:
        changed = frozenset(self._read(range(len(self._owners))))
        self._alone, self._once = self._alone | changed & self._once, self._once | changed
        self._watch()
        return self._values


def _seen(key: Any, value: Any) -> Any:  # noqa: PLR0911 - a case for each type
    """Return a copy of a value that is saved, or a mark for another value."""
    if isinstance(value, dict):
        if not value:
            return _EMPTY
        return Mark(tuple(map(id, value.values())) if key == MODULES else (id(value), *value))
    if value is None or type(value) in PLAIN or isinstance(value, numpy.generic | Enum):
        return value
    if isinstance(value, torch.Tensor | numpy.ndarray):
        if is_small(value) and (isinstance(value, torch.Tensor) or value.dtype.kind in "biufc"):
            return _Copy(value)
        return Mark((id(value), *(versions_of([value]) if isinstance(value, torch.Tensor) else ())))
    if isinstance(value, tuple):
        seen = tuple(one if type(one) in PLAIN else _seen("", one) for one in value[:_MOST_SEEN])
        return Mark((len(value), *seen)) if any(isinstance(one, Mark | _Copy) for one in seen) else value
    if isinstance(value, list | deque):
        return Mark((id(value), len(value), *map(id, islice(value, _MOST_SEEN))))
    return Mark((id(value), len(value))) if isinstance(value, set) else Mark((id(value),))


def sent(value: Any) -> Any:
    """Return a value in a form that a checkpoint can hold."""
    if isinstance(value, _Copy):
        return torch.from_numpy(value.value) if isinstance(value.value, numpy.ndarray) else value.value
    if isinstance(value, numpy.generic):
        return value.item()
    return value.name if isinstance(value, Enum) else value


def fitted(sent: Any, now: Any) -> Any:
    """Convert a value from :func:`sent` to the type of the current value."""
    if isinstance(now, Enum) and isinstance(sent, str):
        return type(now)[sent]
    if isinstance(sent, torch.Tensor):
        if isinstance(now, numpy.ndarray):
            return sent.cpu().numpy().copy()
        return sent.to(now.device, copy=True) if isinstance(now, torch.Tensor) else sent
    return type(now)(sent) if isinstance(now, numpy.generic) and isinstance(sent, int | float) else sent
