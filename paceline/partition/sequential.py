"""Cut of an ``nn.Sequential``, in which each block takes the output of the previous block.

Nothing is traced: blocks are called as they are, so they may do anything that Python can. A block returns tensors in
any nesting of tuples, lists and dicts. One pass over an example records the nesting at each boundary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import nn

from paceline.errors import InputError
from paceline.partition.base import Activations, Layers, Stage, dataclass_remedy, select_names, tensor_names
from paceline.partition.preserve import preserved
from paceline.system.torch_internals import (
    HOOKS,
    TreeSpec,
    own_modules,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    version_of,
)


@dataclass
class _Boundary:
    """Values that enter a block."""

    spec: TreeSpec  # nesting of the values
    leaves: list[Any]  # leaves of the values, with ``_TENSOR`` in place of each tensor
    tensors: list[torch.Tensor]  # tensors of the example, while boundaries are recorded
    # for each tensor, whether this block or a later block changes it in place
    mutated: list[bool] = field(default_factory=list)


class SequentialCut(Layers):
    """Blocks of a nested ``nn.Sequential``."""

    def __init__(self, model: nn.Sequential, example: Any) -> None:
        found = _blocks_of(model, "")
        self.names = [name for name, _ in found]
        self._blocks = [block for _, block in found]
        self._model, self._modules = model, _modules_of(model, "")
        self._tensor_names = tensor_names(model)
        with preserved(model), torch.no_grad():
            self._boundaries = self._record_boundaries(example)

    def stage(self, begin: int, end: int) -> Stage:
        after = self._boundaries[end] if end < len(self._blocks) else None
        return _SequentialStage(self, begin, end, self._boundaries[begin] if begin else None, after)

    def check(self) -> None:
        now = _modules_of(self._model, "")
        if now == self._modules:
            return
        name = next(one for one in [*self._modules, *now] if self._modules.get(one) != now.get(one))
        before, after = self._modules.get(name), now.get(name)
        happened = "got another hook or another forward"
        if before is None or after is None or before[0] is not after[0]:
            happened = "was added" if before is None else "was removed" if after is None else "was replaced"
        raise InputError(
            f"{f'The layer {name!r} of the model' if name else 'The model'} {happened} after paceline.start, but a "
            f"pipeline computes with the layers of the start. Make the change before paceline.start or inside of a "
            f"layer, or use strategy 'allreduce'."
        )

    def _record_boundaries(self, values: Any) -> list[_Boundary]:
        boundaries = []
        mutated: list[set[int]] = []
        for name, block in zip(self.names, self._blocks, strict=True):
            boundary = _boundary(values)
            boundaries.append(boundary)
            versions = [version_of(tensor) for tensor in boundary.tensors]
            values = block(values)
            if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(values)):
                remedy = dataclass_remedy(values) or (
                    "A model that is cut needs a tensor, or a tuple, list or dict of tensors, from each layer."
                )
                raise InputError(
                    f"Layer {name!r} ({type(block).__name__}) returns no tensor but {type(values).__name__}. {remedy}"
                )
            now = [version_of(tensor) for tensor in boundary.tensors]
            changed = zip(boundary.tensors, versions, now, strict=True)
            mutated.append({_storage(tensor) for tensor, before, after in changed if before != after})
        for place, boundary in enumerate(boundaries[1:], 1):
            later = set().union(*mutated[place:])
            boundary.mutated = [_storage(tensor) in later for tensor in boundary.tensors]
            self._check_shared_storage(place, boundary)
        for boundary in boundaries:
            boundary.tensors = []
        return boundaries

    def _check_shared_storage(self, place: int, boundary: _Boundary) -> None:
        storages = [_storage(t) for t, mutated in zip(boundary.tensors, boundary.mutated, strict=True) if mutated]
        if len(storages) > len(set(storages)):
            raise InputError(
                f"Layer {self.names[place - 1]!r} returns two tensors that share memory, and a later layer changes it "
                f"in place: after a cut only one of them would change. Return a copy (.clone()), or do not change it "
                f"in place."
            )


class _SequentialStage(Stage):
    def __init__(
        self, layers: SequentialCut, begin: int, end: int, before: _Boundary | None, after: _Boundary | None
    ) -> None:
        self._names = layers.names[begin:end]
        self._blocks = layers._blocks[begin:end]
        self._before, self._after = before, after
        modules = nn.ModuleList(self._blocks)
        self.parameters = select_names(modules.parameters(), layers._tensor_names)
        self.buffers = select_names(modules.buffers(), layers._tensor_names)

    def __call__(self, values: Any) -> Any:
        if self._before is not None:
            values = self._unflatten(values, self._before)
        for block in self._blocks:
            values = block(values)
        return values if self._after is None else self._flatten(values, self._after)

    def _unflatten(self, given: Activations, boundary: _Boundary) -> Any:
        """Nest the tensors; copy those changed in place, which autograd forbids for leaves that require a gradient."""
        tensors = (
            tensor.clone() if mutated else tensor for tensor, mutated in zip(given, boundary.mutated, strict=True)
        )
        leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in boundary.leaves]
        return tree_unflatten(leaves, boundary.spec)

    def _flatten(self, values: Any, boundary: _Boundary) -> Activations:
        found = _boundary(values)
        if found.spec != boundary.spec or found.leaves != boundary.leaves:
            raise InputError(
                f"Layer {self._names[-1]!r} returned {_describe(found)} for this microbatch, but "
                f"{_describe(boundary)} for the first one. Between stages only the values of tensors may differ: "
                f"return other numbers as tensors."
            )
        return tuple(found.tensors)


class _Tensor:
    def __repr__(self) -> str:
        return "tensor"


_TENSOR = _Tensor()


def _boundary(values: Any) -> _Boundary:
    leaves, spec = tree_flatten(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return _Boundary(spec, [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], tensors)


def _describe(boundary: _Boundary) -> str:
    return repr(tree_unflatten(boundary.leaves, boundary.spec))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def is_sequential(model: nn.Module) -> TypeGuard[nn.Sequential]:
    """Return whether a module only calls its children one after the other."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def _blocks_of(model: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    found = []
    for name, block in own_modules(model).items():  # named_children drops a module that occurs twice
        assert block is not None
        found += _blocks_of(block, f"{prefix}{name}.") if is_sequential(block) else [(prefix + name, block)]
    return found


def _modules_of(model: nn.Module, name: str) -> dict[str, tuple[object, ...]]:
    """Return by name the blocks, and the containers with the additions of their own calls."""
    if not is_sequential(model):
        return {name: (model,)}
    found = {name: (model, vars(model).get("forward"), *(one for kind in HOOKS for one in getattr(model, kind)))}
    for key, block in own_modules(model).items():
        assert block is not None
        found |= _modules_of(block, f"{name}.{key}" if name else key)
    return found
