"""A model that is a list of blocks: ``nn.Sequential``, where each block takes what the one before returned.

A block is called as it is, so it may do anything that Python can: nothing is traced. What crosses a boundary is what a
block returns, in any nesting of tuples, lists and dicts; one pass over an example shows how it is nested.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from paceline.data.keys import kept_states
from paceline.errors import InputError
from paceline.partition.base import Crossing, Layers, Stage, named, names_of, unopened
from paceline.partition.preserve import untouched


@dataclass
class _Boundary:
    """What stands before a block: how it is nested, its leaves (none for a tensor), and what is changed later.

    ``changed``: for each tensor whether this block or a later one changes it in place.
    """

    spec: TreeSpec
    leaves: list[Any]
    tensors: list[torch.Tensor]
    changed: list[bool] = field(default_factory=list)


class SequentialCut(Layers):
    """The blocks of nested ``nn.Sequential``."""

    def __init__(self, model: nn.Sequential, example: Any) -> None:
        self._model = model
        found = _blocks_of(model, "")
        self.names = [name for name, _ in found]
        self._blocks = [block for _, block in found]
        self._tensor_names = names_of(model)
        with untouched(model), kept_states(), torch.no_grad():
            self._boundaries = self._walk(example)

    def stage(self, begin: int, end: int) -> Stage:
        after = self._boundaries[end] if end < len(self._blocks) else None
        return _BlockStage(self, begin, end, self._boundaries[begin] if begin else None, after)

    def _walk(self, values: Any) -> list[_Boundary]:
        boundaries = []
        mutated: list[set[int]] = []
        for name, block in zip(self.names, self._blocks, strict=True):
            boundary = _boundary(values)
            boundaries.append(boundary)
            versions = [tensor._version for tensor in boundary.tensors]
            values = block(values)
            if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(values)):
                cure = unopened(values) or (
                    "A model that is cut needs a tensor, or a tuple, list or dict of tensors, from each layer."
                )
                raise InputError(
                    f"Layer {name!r} ({type(block).__name__}) returns no tensor but {type(values).__name__}. {cure}"
                )
            now = [tensor._version for tensor in boundary.tensors]
            changed = zip(boundary.tensors, versions, now, strict=True)
            mutated.append({_storage(tensor) for tensor, before, after in changed if before != after})
        for place, boundary in enumerate(boundaries[1:], 1):
            later = set().union(*mutated[place:])
            boundary.changed = [_storage(tensor) in later for tensor in boundary.tensors]
            self._check_twice(place, boundary)
        for boundary in boundaries:
            boundary.tensors = []
        return boundaries

    def _check_twice(self, place: int, boundary: _Boundary) -> None:
        storages = [_storage(t) for t, changed in zip(boundary.tensors, boundary.changed, strict=True) if changed]
        if len(storages) > len(set(storages)):
            raise InputError(
                f"Layer {self.names[place - 1]!r} returns the same memory twice, and a later layer changes it in "
                f"place: the two would part when the model is cut. Return a copy (.clone()), or do not change it."
            )


class _BlockStage(Stage):
    def __init__(
        self, layers: SequentialCut, begin: int, end: int, before: _Boundary | None, after: _Boundary | None
    ) -> None:
        self._names = layers.names[begin:end]
        self._blocks = layers._blocks[begin:end]
        self._before, self._after = before, after
        modules = nn.ModuleList(self._blocks)
        self.parameters = named(modules.parameters(), layers._tensor_names)
        self.buffers = named(modules.buffers(), layers._tensor_names)

    def __call__(self, values: Any) -> Any:
        if self._before is not None:
            values = self._nested(values, self._before)
        for block in self._blocks:
            values = block(values)
        return values if self._after is None else self._flat(values, self._after)

    def _nested(self, given: Crossing, boundary: _Boundary) -> Any:
        """A tensor that is changed in place is a copy: what requires a gradient must not be changed."""
        tensors = (
            tensor.clone() if changed else tensor for tensor, changed in zip(given, boundary.changed, strict=True)
        )
        leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in boundary.leaves]
        return tree_unflatten(leaves, boundary.spec)

    def _flat(self, values: Any, boundary: _Boundary) -> Crossing:
        leaves, spec = tree_flatten(values)
        shown = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if spec != boundary.spec or shown != boundary.leaves:
            raise InputError(
                f"Layer {self._names[-1]!r} returned {_shown(shown, spec)} for this microbatch, but "
                f"{_shown(boundary.leaves, boundary.spec)} for the first one. Between stages only the values of "
                f"tensors may differ: return other numbers as tensors."
            )
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


class _Tensor:
    def __repr__(self) -> str:
        return "tensor"


_TENSOR = _Tensor()


def _boundary(values: Any) -> _Boundary:
    leaves, spec = tree_flatten(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return _Boundary(spec, [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], tensors)


def _shown(leaves: list[Any], spec: TreeSpec) -> str:
    return repr(tree_unflatten(leaves, spec))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def is_list(model: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether a module only calls its children one after the other."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def _blocks_of(model: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    found = []
    for name, block in model._modules.items():  # named_children leaves out one that stands there twice
        assert block is not None
        found += _blocks_of(block, f"{prefix}{name}.") if is_list(block) else [(prefix + name, block)]
    return found
