"""Dispatch mode that records the operations that compute a model's tensors, and frees the tensors' memory.

Operations run at once, so a script may read any value, and random generators advance as they do without the mode. Only
the most recently used storages keep their memory, in total at most twice the size of the largest storage. A storage
that is needed again is computed from its recorded operations.

A storage is kept in memory, and not recorded, if its record would be larger than its values, if its values come from
outside torch (NumPy, a file) or from an operator that is not torch's own, or if the script has its address.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from paceline.checkpoint.weights.deferred.calls import Call, bytes_of_constant, constant, has_storage
from paceline.checkpoint.weights.deferred.heap import FreedMemory
from paceline.checkpoint.weights.deferred.operations import (
    Conditions,
    Layout,
    Memory,
    Operation,
    RandomState,
    Read,
    compute,
    digest_of,
    results_of,
)
from paceline.errors import InputError
from paceline.system.torch_internals import (
    UncompiledMode,
    count_users,
    storage_id,
    tree_map_only,
    without_dispatch_modes,
    without_functions,
)

_RECORD_BYTES, _STATE_BYTES = 1000, 5056
"""Approximate size of a recorded operation, and of the state of the CPU's generator."""
_HELD = 2  # Limit of the bytes in memory, as a multiple of the largest storage. ``orthogonal_`` needs two of that size.
_UNUSED_EVERY = 32  # number of operations between two searches for storages that the script no longer uses
_BY_ADDRESS = {"__array__", "__deepcopy__", "__dlpack__", "__reduce_ex__", "apply_", "data_ptr", "map2_", "map_"}
_BY_ADDRESS |= {"numpy", "share_memory_", "storage", "to_dlpack", "tolist", "untyped_storage"}
"""Functions of tensors that read or write memory without an operator."""


@dataclass(eq=False)
class Tracked:
    """Storage of a tensor of the model, or of an intermediate result."""

    storage: torch.UntypedStorage
    memory: Memory
    last: Operation | None = None  # last operation that wrote to it. None if there is none, or if the storage is kept.
    cost: int = 0  # approximate size of its record
    is_kept: bool = False  # whether it keeps its memory
    is_filled: bool = True  # whether its memory is allocated and holds its values

    def fill(self) -> None:
        if not self.is_filled:
            assert self.last is not None
            compute(self.last, self.memory, self.storage)
            self.is_filled = True

    def write(self, storage: torch.UntypedStorage) -> None:
        """Write the values into another storage of the same size, which needs no second copy of them."""
        if self.is_filled:
            storage.copy_(self.storage)
        else:
            assert self.last is not None
            compute(self.last, self.memory, storage)

    @property
    def digest(self) -> str:
        """Hash of the record from which the values are computed. Empty if there is no record."""
        return "" if self.last is None else digest_of(self.last, self.memory)

    def keep(self) -> None:
        """Compute the values and drop the record."""
        self.fill()
        self.is_kept, self.last, self.cost = True, None, 0

    def free(self) -> None:
        """Free the memory, if the values can be computed again."""
        if self.last is not None:
            self.storage.resize_(0)
            self.is_filled = False

    @property
    def is_used(self) -> bool:
        return count_users(self.storage) > 1


class Recorder(UncompiledMode):
    """Dispatch mode that records operations and frees memory, and the storages of their results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracked: dict[int, Tracked] = {}
        self._filled: dict[Tracked, None] = {}  # storages that can be freed, in order of their last use
        self._freed = FreedMemory()
        self._filled_bytes = self._largest = self._calls = self._recorded = 0

    def __torch_dispatch__(
        self, function: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with without_functions():
            return self._run(Call(function, args, kwargs or {}))

    def find(self, tensor: torch.Tensor) -> Tracked | None:
        return self._tracked.get(storage_id(tensor)) if has_storage(tensor) else None

    def keep(self, storages: Iterable[Tracked | None]) -> None:
        """Keep the memory of storages from now on."""
        for one in storages:
            if one is not None:
                one.keep()
                self._unmark(one)

    def storages(self) -> list[Tracked]:
        """Return the storages that tensors still use, and forget all others."""
        self._tracked = {key: one for key, one in self._tracked.items() if one.is_used}
        for one in [one for one in self._filled if not one.is_used]:
            self._free(one)
        return [*self._tracked.values()]

    def _run(self, call: Call) -> Any:
        if any(type(one).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for one in call.tensors):
            raise _refusal(call.tensors)
        used = [*dict.fromkeys(filter(None, map(self.find, call.tensors)))]
        if call.kind.is_view:
            with _allocated(used):
                return call.run()
        if not used:
            self._shrink(call.expected_bytes)
        target = self.find(call.written[0]) if call.kind.overwrites else None
        replaced = target if target is not None and call.overwrites(target.memory.nbytes) else None
        read = [one for one in used if call.kind.reads_values and one is not replaced]
        for one in read:
            one.fill()
            self._mark(one)
        default, given = call.random_states()
        with _allocated(one for one in used if one not in read):
            result = call.run()
            if replaced is not None:
                replaced.is_filled = True
            self._keep_or_record(call, replaced, Conditions(drawn=default), given, result)
        self._shrink()
        return result

    def _keep_or_record(
        self,
        call: Call,
        replaced: Tracked | None,
        conditions: Conditions,
        given: Mapping[int, RandomState],
        result: Any,
    ) -> None:
        """Record the call, or keep the memory of all storages that it wrote to."""
        inputs = {storage_id(one) for one in call.tensors if has_storage(one)}
        outputs = [self._track(one, inputs) for one in results_of(result)]
        targets = [self.find(one) for one in call.written]
        changed = [one for one in dict.fromkeys([*targets, *outputs]) if one is not None]
        if call.kind.is_uninitialized or not changed:
            return
        are_ours = None not in targets and not any(one.is_kept for one in changed)
        are_whole = all(one.memory.nbytes == one.storage.nbytes() for one in changed)
        if not (are_ours and are_whole and call.is_recordable):
            self.keep(changed)
            return
        constants = [one for one in call.tensors if self._is_constant(one)]
        cost = _RECORD_BYTES + _STATE_BYTES * call.kind.is_random + sum(map(bytes_of_constant, constants))
        if cost > sum(one.memory.nbytes for one in changed):
            self.keep(changed)
            return
        memories = [None if one is None else one.memory for one in outputs]
        operation = self._record(call, replaced, conditions, given, memories)
        for one in changed:
            one.last, one.cost = operation, cost + (0 if one is replaced else one.cost)
            self._mark(one)
            if one.cost > one.memory.nbytes:
                self.keep([one])

    def _record(
        self,
        call: Call,
        replaced: Tracked | None,
        conditions: Conditions,
        given: Mapping[int, RandomState],
        outputs: Sequence[Memory | None],
    ) -> Operation:
        reads: list[Read] = []

        def recorded(value: Any) -> Any:
            if isinstance(value, torch.Generator):
                return given[id(value)]
            if self._is_constant(value):
                return constant(value)
            tracked = self.find(value)
            assert tracked is not None
            matters = call.kind.reads_values and tracked is not replaced
            reads.append(Read(tracked.memory, Layout.of(value), tracked.last if matters else None))
            return reads[-1]

        kinds = (torch.Tensor, torch.Generator)
        args, kwargs = tree_map_only(kinds, recorded, (tuple(call.args), dict(call.kwargs)))
        self._recorded += 1
        return Operation(self._recorded, call.function, args, kwargs, reads, outputs, conditions)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        tracked = self.find(tensor)
        return tracked is None or tracked.is_kept

    def _track(self, result: object, inputs: Collection[int]) -> Tracked | None:
        """Track the storage of a result, unless it is empty or belongs to an argument."""
        if not isinstance(result, torch.Tensor) or not has_storage(result):
            return None
        storage, key = result.untyped_storage(), storage_id(result)
        if key in inputs or not storage.nbytes():
            return None
        if key not in self._tracked:
            memory = Memory(storage.nbytes(), result.device)
            self._tracked[key] = Tracked(storage, memory, is_kept=not storage.resizable())
            self._largest = max(self._largest, memory.nbytes)
        return self._tracked[key]

    def _mark(self, one: Tracked) -> None:
        """Mark a filled storage as the most recently used."""
        self._unmark(one)
        if one.last is not None:
            self._filled[one] = None
            self._filled_bytes += one.memory.nbytes

    def _unmark(self, one: Tracked) -> None:
        if one in self._filled:
            del self._filled[one]
            self._filled_bytes -= one.memory.nbytes

    def _shrink(self, more: int = 0) -> None:
        """Free the least recently used storages until ``more`` bytes fit."""
        limit = _HELD * max(self._largest, more)
        self._calls += 1
        if self._calls % _UNUSED_EVERY == 0 or self._filled_bytes + more > limit:
            self.storages()
        while self._filled and self._filled_bytes + more > limit:
            self._free(next(iter(self._filled)))

    def _free(self, one: Tracked) -> None:
        one.free()
        self._unmark(one)
        self._freed.add(one.memory.nbytes)


@contextmanager
def _allocated(storages: Iterable[Tracked]) -> Iterator[None]:
    """Allocate memory for storages without values, because torch checks that a view lies inside its storage."""
    empty = [one for one in storages if not one.is_filled]
    for one in empty:
        one.storage.resize_(one.memory.nbytes)
    try:
        yield
    finally:
        for one in empty:
            if not one.is_filled:
                one.storage.resize_(0)


class AddressReads(TorchFunctionMode):
    """Function mode that keeps the memory of tensors whose address is passed to code outside torch."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, function: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(function, "__name__", "") in _BY_ADDRESS:
            with without_functions(), without_dispatch_modes():
                self._recorder.keep(self._recorder.find(one) for one in args if isinstance(one, torch.Tensor))
        return function(*args, **(kwargs or {}))


def _refusal(tensors: Sequence[torch.Tensor]) -> InputError:
    """Return the error for a tensor subclass with its own operators, naming the module that uses it."""
    kind = next(type(one) for one in tensors if type(one).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__)
    frame, module = sys._getframe(1), ""
    while frame.f_back is not None and not module:
        frame = frame.f_back
        owner = frame.f_locals.get("self")
        module = type(owner).__name__ if isinstance(owner, nn.Module) else ""
    return InputError(
        f"{module or 'The model'} is built with {kind.__name__}, a tensor class with operators of its own, whose "
        f"values paceline.deferred() cannot compute again: build it outside the with block."
    )
