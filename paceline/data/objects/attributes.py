"""Snapshot and restore of Python objects besides parameters and buffers: generators, numbers, tensors, containers.

The search follows attributes, slots, class attributes of user code, closures, and the functions and globals that
functions of user code name, including those of other modules of user code.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import threading
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, MutableMapping
from contextvars import ContextVar
from enum import Enum
from functools import _lru_cache_wrapper, lru_cache, partial
from itertools import chain, islice
from numbers import Number
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

from paceline.data.objects.entries import Cells, Entries
from paceline.system.torch_internals import BACKWARD_FLAG, BUFFERS, MODULES, PARAMETERS
from paceline.system.user_code import is_user_class, is_user_code

Leaf: TypeAlias = (
    "bool | int | float | torch.Tensor | numpy.ndarray[Any, Any] | torch.Generator | random.Random | "
    "numpy.random.Generator | numpy.random.RandomState"
)
GENERATORS = torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState
_MOST_OBJECTS = 20_000
_MOST_ENTRIES = 1_000
_MOST_NUMBERED = 100
"""Longest list whose entries are tracked separately."""
_MOST_BYTES = 1 << 28
"""Total bytes of tensors and arrays to copy. Those beyond this limit are not part of the snapshot."""
PLAIN = (bool, int, float, str)
_NUMBERS = str, bytes, Number, numpy.generic, Enum
_SKIPPED = type(None), ModuleType, BuiltinFunctionType, torch.optim.Optimizer
_ARRAYS = torch.Tensor, numpy.ndarray
_SEQUENCES = list, tuple, set, deque
_CELLS = CellType, ContextVar
_KINDS = (
    *(_NUMBERS, _SKIPPED, GENERATORS, _ARRAYS, _SEQUENCES, dict, type, _CELLS),
    *(MethodType, partial, _lru_cache_wrapper, FunctionType, object),
)
"""Kinds of values. A value is of the first kind that fits."""
_FOLLOWED = (
    *(*_NUMBERS, *GENERATORS, *_ARRAYS, list, dict, set, deque, FunctionType, nn.Module),
    *(ContextVar, threading.local, _lru_cache_wrapper),
)
_OF_MODULES = PARAMETERS, BUFFERS, MODULES, BACKWARD_FLAG, "training"


class Attributes:
    """Snapshot of the values that objects hold.

    Args:
        roots: objects to start from, by their names in messages.
        known: ids of objects to skip, such as tensors that are saved elsewhere.
        copies: whether to include copies of tensors and arrays.

    Attributes:
        values: generator states, numbers and copies of tensors, by names such as ``model.head.rng``.
        sizes: number of entries of each container and of each ``lru_cache``, by the same names.
        tensors: tensors in ``values``, as the original objects.
        owners: mappings that hold values, by name: attributes, slots, dictionaries, lists, globals that functions name.
        objects: objects whose attributes are in ``owners``, by the same names.
    """

    def __init__(self, roots: dict[str, Any], known: set[int], copies: bool = True) -> None:
        self.values: dict[str, Any] = {}
        self.sizes: dict[str, int] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.owners: dict[str, MutableMapping[Any, Any]] = {}
        self.objects: dict[str, object] = {}
        self._containers: list[tuple[Any, Any]] = []
        self._named: list[tuple[Any, str, Any]] = []  # entries of slots, classes and globals, as (owner, key, value)
        self._leaves: list[tuple[Any, Any]] = []
        self._copies = copies
        self._room = _MOST_BYTES
        own = (random._inst, torch.default_generator, numpy.random.mtrand._rand)
        self._seen = {*known, *map(id, own)}
        self._classes: set[type] = set()
        model = roots.get("model")
        self._trained = {id(one) for one in model.modules()} if isinstance(model, nn.Module) else set()
        """Ids of the modules whose buffers are saved with the model."""
        waiting = list(roots.items())
        while waiting and len(self._seen) < _MOST_OBJECTS:
            name, value = waiting.pop()
            if (kind := _kind_of(value.__class__)) is _NUMBERS:
                self.values[name] = value
            elif kind is not _SKIPPED and id(value) not in self._seen:
                self._seen.add(id(value))
                waiting += self._visit(name, value, kind)

    def _visit(self, name: str, value: Any, kind: Any) -> Iterator[tuple[str, Any]]:  # noqa: C901, PLR0912 - by kind
        if kind is GENERATORS:
            self._keep(name, value, _state_of(value))
        elif kind is _ARRAYS:
            if self._copies and is_dense(value) and value.nbytes <= self._room:
                self._room -= value.nbytes
                self._keep(name, value, value.detach().clone() if isinstance(value, torch.Tensor) else value.copy())
        elif kind is _SEQUENCES:
            self.sizes[name] = len(value)
            if isinstance(value, list) and len(value) <= _MOST_NUMBERED:
                self.owners.setdefault(name, Entries(value, range(len(value))))
            if len(value) <= _MOST_ENTRIES and not isinstance(value, tuple):
                self._containers.append((value, value.copy()))
            yield from ((f"{name}[{place}]", one) for place, one in enumerate(islice(value, _MOST_ENTRIES)))
        elif kind is dict:
            self.sizes[name] = len(value)
            if len(value) <= _MOST_ENTRIES:
                self.owners.setdefault(name, value)
                self._containers.append((value, value.copy() if value else {}))
                yield from ((f"{name}[{key!r}]", one) for key, one in value.items())
        elif kind is type:
            yield from self._of_class(name, value, value) if is_user_class(value) else ()
        elif kind is _CELLS:
            self._containers.append((value, _content_of(value)))
            yield name, _content_of(value)
        elif kind is MethodType:
            yield from ((name, value.__self__), (name, value.__func__))
        elif kind is partial:
            yield from ((name, value.func), (f"{name} arguments", value.args), (f"{name} arguments", value.keywords))
        elif kind is _lru_cache_wrapper:
            self.sizes[value.__name__] = value.cache_info().currsize
            yield name, value.__wrapped__
        elif kind is FunctionType:
            yield from self._of_function(name, value)
        else:
            yield from self._of_object(name, value)

    def _of_object(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        module = isinstance(value, nn.Module)
        users = _user_classes(value.__class__)
        if not module and not users:
            own = type(value).__module__.partition(".")[0]
            if own in ("paceline", "torch") and not isinstance(value, Dataset | Sampler):
                return
        entries = getattr(value, "__dict__", None)
        if isinstance(entries, dict):
            self._containers.append((entries, entries.copy()))
            self.owners.setdefault(name, entries)
            self.objects.setdefault(name, value)
            for key, one in entries.items():
                if not module or key not in _OF_MODULES:
                    yield f"{name}.{key}", one
            held = [MODULES] if id(value) in self._trained else [MODULES, BUFFERS]
            for part in held if module else ():
                yield from ((f"{name}.{key}", one) for key, one in (entries.get(part) or {}).items())
        for kind in users:
            yield from self._of_class(name, value, kind)

    def _of_class(self, name: str, value: Any, kind: type) -> Iterator[tuple[str, Any]]:
        """Yield the slots that a class of user code gives an object, and the attributes and methods of the class."""
        for key in _slots_of(kind) if value is not kind else ():
            if hasattr(value, key):
                yield from self._entry(f"{name}.{key}", value, key, getattr(value, key))
        if kind in self._classes:
            return
        self._classes.add(kind)
        for key, one in [*vars(kind).items()]:
            function = one.fget if isinstance(one, property) else getattr(one, "__func__", one)
            if isinstance(function, FunctionType | _lru_cache_wrapper):
                yield name, function
            elif not key.startswith("__") and not inspect.isdatadescriptor(one):
                yield from self._entry(f"{kind.__name__}.{key}", kind, key, one)

    def _of_function(self, name: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
        """Yield a function's closures and defaults, and for user code also its attributes and the globals it names."""
        code, known = function.__code__, is_user_code(function.__code__.co_filename)
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        if known:
            self._add_cells(function, cells)
        yield from cells.items()
        yield f"{name} defaults", function.__defaults__
        if known:
            self._containers.append((function.__dict__, function.__dict__.copy()))
            if function.__dict__:
                self.owners.setdefault(function.__name__, function.__dict__)
            yield from ((f"{function.__name__}.{key}", one) for key, one in function.__dict__.items())
            names = _names_in(code)
            for key in names:
                one = function.__globals__.get(key, _SKIPPED)
                if isinstance(one, ModuleType) and is_user_code(getattr(one, "__file__", None) or "<"):
                    held = [(key, one) for key, one in vars(one).items() if key in names and _is_followed(one)]
                    for inner, value in held:
                        yield from self._entry(f"{key}.{inner}", vars(one), inner, value)
                elif _is_followed(one):
                    yield from self._entry(key, function.__globals__, key, one)

    def _add_cells(self, function: FunctionType, cells: dict[str, CellType]) -> None:
        """Record the variables of an enclosing function that a function reads."""
        held = {key: cell for key, cell in cells.items() if key != "__class__" and _is_followed(_content_of(cell))}
        if not held:
            return
        scope = function.__qualname__.rpartition(".<locals>")[0].replace("<locals>.", "")
        owner = self.owners.setdefault(f"{scope}()", Cells())
        if isinstance(owner, Cells):
            owner.add(held)

    def _entry(self, name: str, owner: Any, key: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Record and yield a slot, class attribute or global, which is restored individually."""
        self._named.append((owner, key, value))
        place = owner.get("__name__", "") if isinstance(owner, dict) else name.removesuffix(f".{key}")
        held = self.owners.setdefault(place, Entries(owner))
        if isinstance(held, Entries):
            held.keys_known[key] = None
        yield name, value

    def _keep(self, name: str, value: Any, state: Any) -> None:
        self.values[name] = state
        if isinstance(value, torch.Tensor):
            self.tensors[name] = value
        self._leaves.append((value, state))

    def generators(self) -> Iterator[tuple[str, Any]]:
        """Return the names and states of generators."""
        held = [state for value, state in self._leaves if isinstance(value, GENERATORS)]
        return ((name, state) for name, state in self.values.items() if any(state is one for one in held))

    def numbers(self) -> dict[str, tuple[MutableMapping[Any, Any], Any]]:
        """Return the mapping and the key of each floating-point number, by the names in ``values``."""
        return {
            name: (entries, key)
            for owner, entries in self.owners.items()
            for key, value in entries.items()
            if type(value) is float
            for name in (f"{owner}.{key}", f"{owner}[{key!r}]", str(key))
            if name in self.values
        }

    def put_back(self) -> None:
        """Restore all recorded values."""
        for container, before in self._containers:
            _put_back(container, before)
        for owner, key, value in self._named:
            if isinstance(owner, dict):
                owner[key] = value
            elif getattr(owner, key, None) is not value:
                with contextlib.suppress(AttributeError, TypeError):
                    setattr(owner, key, value)
        for value, state in self._leaves:
            if isinstance(value, GENERATORS):
                _set_state(value, state)
            elif isinstance(value, torch.Tensor):
                if not same(value, state):
                    value.data.copy_(state)
            elif not same(value, state):
                value[...] = state


def is_dense(value: Any) -> bool:
    """Return whether a value is an array, or a tensor that can be copied, compared and restored like one."""
    if isinstance(value, torch.Tensor):  # sparse tensors have no size in bytes, and those on the meta device no values
        return value.layout == torch.strided and not value.is_meta
    return isinstance(value, numpy.ndarray)


def same(left: Any, right: Any) -> bool:  # noqa: PLR0911 - a case for each type
    """Return whether two values are equal. Objects of one type that cannot be compared count as equal."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        alike = left.shape == right.shape and left.dtype == right.dtype and left.layout == right.layout
        left, right = left.detach(), right.detach()
        return alike and (torch.equal(left, right) or torch.allclose(left, right, rtol=0.0, atol=0.0, equal_nan=True))
    if isinstance(left, numpy.ndarray) and isinstance(right, numpy.ndarray):
        return left.shape == right.shape and left.tobytes() == right.tobytes()
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return bool(left == right or (left != left and right != right))
    if isinstance(left, _NUMBERS):
        return bool(left == right or left != left)
    return True


def _names_in(code: CodeType) -> dict[str, None]:
    """Return the names of globals and attributes in a function and in the functions and comprehensions inside of it."""
    inner = (_names_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return dict.fromkeys((*code.co_names, *chain.from_iterable(inner)))


@lru_cache(1024)  # isinstance with torch.Tensor or Number calls Python
def _kind_of(kind: type) -> Any:
    """Return the first of ``_KINDS`` that fits the values of a type."""
    return next(one for one in _KINDS if issubclass(kind, one))


@lru_cache(1024)
def _user_classes(kind: type) -> list[type]:
    """Return the classes of user code from which a class inherits, and itself if it is one."""
    return [one for one in kind.__mro__ if is_user_class(one)]


def _is_followed(value: Any) -> bool:
    """Return whether to follow a global. Objects of other library types may have threads of their own."""
    return is_user_class(value) if isinstance(value, type) else _is_followed_type(value.__class__)


@lru_cache(1024)
def _is_followed_type(kind: type) -> bool:
    return kind in (type(None), Namespace, SimpleNamespace) or issubclass(kind, _FOLLOWED) or is_user_class(kind)


def _slots_of(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    return [key for key in ([slots] if isinstance(slots, str) else slots) if key not in ("__dict__", "__weakref__")]


def _content_of(cell: CellType | ContextVar[Any]) -> Any:
    try:
        return cell.cell_contents if isinstance(cell, CellType) else cell.get()
    except (ValueError, LookupError):  # empty
        return None


def _put_back(container: Any, before: Any) -> None:
    if isinstance(container, CellType):
        if _content_of(container) is not before:
            container.cell_contents = before
    elif isinstance(container, ContextVar):
        if _content_of(container) is not before:
            container.set(before)
    elif isinstance(container, dict):
        if container.keys() != before.keys() or any(container[key] is not value for key, value in before.items()):
            container.clear()
            container.update(before)
    elif isinstance(container, list | deque):
        if len(container) != len(before) or any(now is not then for now, then in zip(container, before, strict=True)):
            container.clear()
            container.extend(before)
    elif container != before:
        container.clear()
        container.update(before)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, numpy.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, numpy.random.RandomState):
        return generator.get_state()
    return None if isinstance(generator, random.SystemRandom) else generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, numpy.random.RandomState):
        generator.set_state(state)
    elif state is not None:
        generator.setstate(state)
