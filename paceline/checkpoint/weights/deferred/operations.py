"""Recorded tensor operations: a graph of frozen records, and the computation of one storage from it.

Operations are numbered in the order in which they ran. To compute the contents of a storage after an operation, all
operations that it depends on run again in that order. Each then reads the same values as in its first run, because all
earlier writes to its storages are repeated, and no others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.system.torch_internals import tree_map_only


@dataclass(frozen=True, eq=False)
class Memory:
    """Identity of a storage in recorded operations."""

    nbytes: int
    device: torch.device

    def allocate(self) -> torch.UntypedStorage:
        return torch.UntypedStorage(self.nbytes, device=self.device)


@dataclass(frozen=True, eq=False)
class Layout:
    """Position of a tensor in its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        return cls(tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, eq=False)
class Read:
    """Tensor argument: a view of a recorded storage."""

    memory: Memory
    layout: Layout
    after: Operation | None  # operation whose results the argument contains. None if the values do not matter.


@dataclass(frozen=True, eq=False)
class Constant:
    """Tensor argument whose values no recorded operation has computed."""

    storage: torch.UntypedStorage
    layout: Layout


@dataclass(frozen=True, eq=False)
class RandomState:
    """State of a random generator before an operation."""

    device: torch.device
    state: torch.Tensor

    @classmethod
    def of(cls, generator: torch.Generator) -> RandomState:
        return cls(generator.device, generator.get_state())

    def generator(self) -> torch.Generator:
        generator = torch.Generator(self.device)
        generator.set_state(self.state)
        return generator


@dataclass(frozen=True, eq=False)
class Conditions:
    """Torch settings, besides its arguments, on which the result of an operation depends."""

    threads: int = field(default_factory=torch.get_num_threads)
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    drawn: RandomState | None = None  # state of the default generator, if the operation draws from it

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the settings for the duration of the context."""
        with ExitStack() as stack:
            if (threads := torch.get_num_threads()) != self.threads:
                torch.set_num_threads(self.threads)
                stack.callback(torch.set_num_threads, threads)
            if (dtype := torch.get_default_dtype()) != self.dtype:
                torch.set_default_dtype(self.dtype)
                stack.callback(torch.set_default_dtype, dtype)
            if self.drawn is not None:
                generator = default_generator(self.drawn.device)
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(self.drawn.state)
            yield


def default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


@dataclass(frozen=True, eq=False)
class Operation:
    """Call of an operator, in which tensors and generators are replaced by records."""

    number: int  # position of the operation in the order of execution
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    reads: Sequence[Read]  # tensors among the arguments, including those that the operation writes to
    # memory of the results. None for a result that shares an argument's memory, or is not a tensor.
    outputs: Sequence[Memory | None]
    conditions: Conditions

    @property
    def memories(self) -> list[Memory]:
        return [*(one.memory for one in self.reads), *(one for one in self.outputs if one is not None)]

    def run(self, storages: dict[Memory, torch.UntypedStorage]) -> None:
        """Run the operation on these storages. Allocate missing ones."""

        def tensor(one: Read | Constant | RandomState) -> Any:
            if isinstance(one, RandomState):
                return one.generator()
            if isinstance(one, Constant):
                return one.layout.view(one.storage)
            if one.memory not in storages:
                storages[one.memory] = one.memory.allocate()
            return one.layout.view(storages[one.memory])

        kinds = (Read, Constant, RandomState)
        args, kwargs = tree_map_only(kinds, tensor, (tuple(self.args), dict(self.kwargs)))
        with self.conditions.applied():
            result = self.function(*args, **kwargs)
        for memory, output in zip(self.outputs, results_of(result), strict=True):
            if memory is not None:
                storages[memory] = output.untyped_storage()


def results_of(result: Any) -> list[Any]:
    if isinstance(result, list | tuple):
        return [leaf for one in result for leaf in results_of(one)]
    return [result]


def compute(last: Operation, memory: Memory, storage: torch.UntypedStorage) -> None:
    """Fill a storage, of 0 bytes or of the size of ``memory``, with the values of ``memory`` after an operation.

    Other storages that the computation needs are freed after their last use.
    """
    operations = sorted(_needed(last), key=lambda one: one.number)
    last_use = {one: index for index, operation in enumerate(operations) for one in operation.memories}
    if storage.nbytes() != memory.nbytes:
        storage.resize_(memory.nbytes)
    storages = {memory: storage}
    with torch.no_grad(), torch.autocast(memory.device.type, enabled=False):
        for index, operation in enumerate(operations):
            operation.run(storages)
            for one in operation.memories:
                if last_use[one] == index and one is not memory:
                    storages.pop(one, None)
    if storages[memory] is not storage:
        storage.copy_(storages[memory])


def digest_of(last: Operation, memory: Memory) -> str:
    """Return a hash of the operations from which :func:`compute` computes the values, in hex digits.

    Records with equal hashes compute equal values. The number of threads is left out: torch may round differently with
    another number, but it depends on the machine, not on the script.
    """
    digest, numbers = hashlib.sha256(), dict[Memory, int]()

    def number_of(one: Memory) -> int:
        return numbers.setdefault(one, len(numbers))

    def text(one: Read | Constant | RandomState) -> str:
        if isinstance(one, RandomState):
            return f"generator {one.device} {_hash_of(one.state.untyped_storage())}"
        layout = one.layout.size, one.layout.stride, one.layout.offset, one.layout.dtype
        if isinstance(one, Constant):
            return f"constant {layout} {_hash_of(one.storage)}"
        return f"memory {number_of(one.memory)} {one.memory.nbytes} {layout} {one.after is not None}"

    for operation in sorted(_needed(last), key=lambda one: one.number):
        kinds = (Read, Constant, RandomState)
        args = tree_map_only(kinds, text, (tuple(operation.args), dict(operation.kwargs)))
        conditions = operation.conditions
        drawn = "" if conditions.drawn is None else text(conditions.drawn)
        outputs = [None if one is None else number_of(one) for one in operation.outputs]
        digest.update(f"{operation.function} {args!r} {conditions.dtype} {drawn} {outputs}\n".encode())
    digest.update(f"{number_of(memory)}".encode())
    return digest.hexdigest()


def _hash_of(storage: torch.UntypedStorage) -> str:
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu()
    return hashlib.sha256(flat.numpy().data).hexdigest()


def _needed(last: Operation) -> set[Operation]:
    found, waiting = {last}, [last]
    while waiting:
        for read in waiting.pop().reads:
            if read.after is not None and read.after not in found:
                found.add(read.after)
                waiting.append(read.after)
    return found
