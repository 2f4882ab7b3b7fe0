"""Operator calls: the tensors that they read and write, and the random states that they use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from paceline.checkpoint.weights.deferred.operations import Constant, Layout, RandomState, default_generator
from paceline.system.torch_internals import Operator, aliases_of, storage_id, tree_leaves

_UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
_OVERWRITING = {"bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_"}
_OVERWRITING |= {"random_", "uniform_", "zero_"}
_RESIZING = {"resize_", "resize_as_"}
_DEVICES = {"cpu", "cuda"}


@dataclass(frozen=True)
class Kind:
    """Properties of an operator."""

    written: tuple[tuple[int, str], ...] = ()  # position and name of the arguments that it writes to
    is_torchs: bool = False  # whether it is one of torch's own operators and does not resize storages
    is_view: bool = False  # whether it only returns views of its arguments
    is_random: bool = False
    is_uninitialized: bool = False  # whether its result has undefined values
    overwrites: bool = False  # whether its result does not depend on the values of the tensor that it writes to
    reads_values: bool = True


@cache
def kind_of(function: Any) -> Kind:
    """Return the properties of an operator, given the function that a dispatch mode receives."""
    if not isinstance(function, Operator):
        return Kind()
    arguments, results = aliases_of(function)
    name = str(function.overloadpacket.__name__)
    is_view = torch.Tag.inplace_view in function.tags or any(alias is False for alias in results)
    return Kind(
        written=tuple((index, key) for index, (key, alias) in enumerate(arguments) if alias),
        is_torchs=function.namespace == "aten" and name not in _RESIZING,
        is_view=is_view and name not in _RESIZING,
        is_random=torch.Tag.nondeterministic_seeded in function.tags or "generator" in dict(arguments),
        is_uninitialized=name in _UNINITIALIZED,
        overwrites=name in _OVERWRITING,
        reads_values=not (name.startswith("new_") or name.endswith("_like")),
    )


@dataclass(frozen=True)
class Call:
    """Call of an operator."""

    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @cached_property
    def kind(self) -> Kind:
        return kind_of(self.function)

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]

    @cached_property
    def written(self) -> list[torch.Tensor]:
        args = [self.args[at] if at < len(self.args) else self.kwargs.get(key) for at, key in self.kind.written]
        return [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]

    def overwrites(self, nbytes: int) -> bool:
        """Return whether the call replaces all ``nbytes`` of a storage without reading the earlier values."""
        if not self.kind.overwrites or not has_storage(self.written[0]) or not covers(self.written[0], nbytes):
            return False
        storages = [storage_id(one) for one in self.tensors if has_storage(one)]
        return storages.count(storage_id(self.written[0])) == 1

    @cached_property
    def is_recordable(self) -> bool:
        """Whether a later call with the same values has the same results."""
        plain = all(has_storage(one) and not (one.is_conj() or one.is_neg()) for one in self.tensors)
        return plain and self.kind.is_torchs

    def run(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    def random_states(self) -> tuple[RandomState | None, dict[int, RandomState]]:
        """Return the states of the default generator, and of generators among the arguments by ``id``."""
        if not self.kind.is_random:
            return None, {}
        given = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Generator)]
        device = torch.device(self.kwargs.get("device") or (self.tensors[0].device if self.tensors else "cpu"))
        default = None if given or device.type not in _DEVICES else RandomState.of(default_generator(device))
        return default, {id(one): RandomState.of(one) for one in given}

    @property
    def expected_bytes(self) -> int:
        """Approximate size of the result of a call without tensors, such as ``randn([3, 4])``."""
        size = self.args[0] if self.args and isinstance(self.args[0], list | tuple) else []
        dtype = self.kwargs.get("dtype") or torch.get_default_dtype()
        return math.prod(size) * dtype.itemsize if size and all(isinstance(one, int) for one in size) else 0


def has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type in _DEVICES and not tensor.is_quantized


def covers(tensor: torch.Tensor, nbytes: int) -> bool:
    """Return whether each element of a storage of ``nbytes`` is exactly one element of a tensor in it."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return tensor.numel() * tensor.element_size() == nbytes


def constant(tensor: torch.Tensor) -> Constant:
    """Return a copy of a tensor that no recorded operation has computed."""
    if tensor.is_contiguous():
        copy = tensor.detach().clone()
        return Constant(copy.untyped_storage(), Layout.of(copy))
    return Constant(tensor.untyped_storage().clone(), Layout.of(tensor))


def bytes_of_constant(tensor: torch.Tensor) -> int:
    """Return the size of the copy that :func:`constant` makes."""
    return tensor.numel() * tensor.element_size() if tensor.is_contiguous() else tensor.untyped_storage().nbytes()
