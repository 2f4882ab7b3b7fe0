"""Tensors in the nested containers of a batch.

Supported are torch's pytree containers (dictionaries, lists, tuples, named tuples, registered classes), dataclasses,
and other mappings such as Hugging Face's ``BatchEncoding``. All but immutable mappings keep their type.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch

from paceline.system.torch_internals import collate, default_collate_fn_map, tree_map


def map_leaves(function: Callable[[Any], Any], values: Any) -> Any:
    """Apply a function to each leaf of nested values. Returns the results in the same containers."""
    return function(values) if isinstance(values, torch.Tensor) else tree_map(partial(_visit, function), values)


def _visit(function: Callable[[Any], Any], leaf: Any) -> Any:
    if isinstance(leaf, MutableMapping):
        mapped = copy.copy(leaf)
        for key in list(leaf):
            mapped[key] = map_leaves(function, leaf[key])
        return mapped
    if isinstance(leaf, Mapping):
        return {key: map_leaves(function, value) for key, value in leaf.items()}
    if not is_dataclass(leaf) or isinstance(leaf, type):
        return function(leaf)
    made = copy.copy(leaf)
    for field in fields(leaf):
        object.__setattr__(made, field.name, map_leaves(function, getattr(leaf, field.name)))
    return made


def map_tensors(function: Callable[[torch.Tensor], Any], values: Any) -> Any:
    """Apply a function to each tensor in nested values. Other leaves stay unchanged."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, values)


def leaves_in(values: Any) -> list[Any]:
    """Return the leaves of nested values."""
    found: list[Any] = []
    map_leaves(found.append, values)
    return found


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested values."""
    return [leaf for leaf in leaves_in(values) if isinstance(leaf, torch.Tensor)]


def samples_in(values: Any, expected: int) -> int:
    """Return the number of samples in a batch from the first dimension of its tensors.

    Returns ``expected`` if the tensors differ in the first dimension, or a second dimension equals ``expected``.

    >>> samples_in((torch.zeros(3, 8), torch.zeros(3)), 4)
    3
    >>> samples_in({"tokens": torch.zeros(7, 4), "lengths": torch.zeros(4)}, 4)
    4
    """
    plain = values.values() if type(values) is dict else values if type(values) in (tuple, list) else ()
    tensors = [one for one in plain if isinstance(one, torch.Tensor)]  # takes a tenth of the time of tensors_in
    if not tensors or len(tensors) < len(plain):
        tensors = tensors_in(values)
    shapes = [tensor.shape for tensor in tensors if tensor.ndim]
    found = {shape[0] for shape in shapes}
    if len(found) != 1 or any(shape[1] == expected for shape in shapes if len(shape) > 1):
        return expected
    return found.pop()


def rows(values: Any, start: int, stop: int) -> Any:
    """Return the samples ``start`` to ``stop`` (exclusive) of a batch of tensors."""
    return map_tensors(lambda tensor: tensor.narrow(0, start, stop - start), values)


def concatenated(batches: list[Any]) -> Any | None:
    """Join batches along the first dimension. Return None if their structures or the shapes of samples differ."""
    outline = map_leaves(lambda _: None, batches[0])
    if any(map_leaves(lambda _: None, one) != outline for one in batches[1:]):
        return None
    columns = list(zip(*map(leaves_in, batches), strict=True))
    for column in columns:
        if not all(isinstance(leaf, torch.Tensor) and leaf.ndim > 0 for leaf in column):
            return None
        if len({leaf.shape[1:] for leaf in column}) > 1:
            return None
    joined = iter([torch.cat(column) for column in columns])
    return map_leaves(lambda _: next(joined), batches[0])


class _Dataclass(type):
    """Metaclass that makes ``isinstance`` true for instances of any dataclass."""

    def __instancecheck__(cls, value: object) -> bool:
        return is_dataclass(value) and not isinstance(value, type)


class _AnyDataclass(metaclass=_Dataclass):
    pass


def _collate_dataclass(items: list[Any], *, collate_fn_map: Any = None) -> Any:
    made = copy.copy(items[0])
    for field in fields(made):
        column = [getattr(item, field.name) for item in items]
        object.__setattr__(made, field.name, collate(column, collate_fn_map=collate_fn_map))
    return made


_COLLATE = {**default_collate_fn_map, _AnyDataclass: _collate_dataclass}


def default_collate(items: list[Any]) -> Any:
    """Collate samples as torch's default collate function does, and dataclasses as well."""
    return collate(items, collate_fn_map=_COLLATE)


class CollatedSizes:
    """Consistency check of a collate function that drops or adds samples: their weights in the mean must not change.

    A microbatch is weighted by the number of samples requested. The weight is right if collating returns that number,
    or the same multiple of it, for every microbatch.
    """

    def __init__(self) -> None:
        self.uneven = ""  # description of two microbatches with different ratios; empty if there are none
        self._first: tuple[int, int] | None = None

    def add(self, asked: int, data: Any) -> None:
        """Compare a microbatch with the first microbatch. Does nothing once an uneven microbatch was found."""
        if self.uneven:
            return
        found = samples_in(data, asked)
        if self._first is None:
            self._first = found, asked
        before, of = self._first
        if found * of != before * asked:
            self.uneven = f"{found} samples for {asked} items in one microbatch and {before} for {of} in another"
