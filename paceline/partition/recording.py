"""Record of a forward pass: its layers, the operations between them, and the uses of each value.

Values are the tensors that exist outside of layers: the model's input, the outputs of layers, and results of operations
on these between layers. Tensors that depend on none of these (positions, masks) do not count: each stage computes them.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.data.nested import map_leaves, tensors_in
from paceline.errors import InputError
from paceline.partition.preserve import plain_attributes
from paceline.partition.watch import Watch
from paceline.system.torch_internals import (
    UncompiledMode,
    mutated_arguments,
    own_buffers,
    own_parameters,
    storage_id,
    tree_leaves,
)

_CONSTANTS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice)
_READS = {"item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__"}
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}


class Ref(int):
    """Reference to a value, by its number."""


class Own(str):
    """Reference to a parameter or buffer of the model, by its name."""


class Argument(int):
    """Reference to an object that a layer was given, by its index among the leaves of the arguments."""


class Kind(Enum):
    """Effect of an operation: it returns or changes values, reads numbers, adds a hook, or reads metadata (shapes)."""

    VALUES = auto()
    CHANGE = auto()
    READ = auto()
    HOOK = auto()
    METADATA = auto()


@dataclass
class Operation:
    """Operation on values; ``calls`` is the number of layer calls begun before it."""

    function: Any
    kind: Kind
    result: Any
    calls: int


@dataclass
class Call:
    """Call of a layer; ``name`` is the path of the module."""

    name: str
    result: Any = None


@dataclass
class Value:
    """Properties of a value.

    Attributes:
        shape, dtype, device, requires_grad: properties of the tensor.
        producer: index of the layer call that computes it. -1 for an input.
        last_use: index of the last layer call that uses it.
        storage: identity of its memory.
        is_whole_number: whether it is an input of integers, from which each stage may compute.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    producer: int
    storage: int
    is_whole_number: bool
    last_use: int = -1


@dataclass
class Record:
    """Calls and operations of a forward pass."""

    inputs: Any = None  # input of the model, with references to values in place of tensors
    values: list[Value] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    draws: set[Any] = field(default_factory=set)  # functions that drew random numbers without a value as an argument
    # for each layer call, the names of the parameters and buffers that it uses
    uses: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    mutated: dict[int, int] = field(default_factory=dict)  # for each storage, the last layer call that changes it
    forbidden: set[int] = field(default_factory=set)  # calls before which the model must not be cut

    def live_at(self, call: int) -> list[int]:
        """Return the values that are computed before a call and used in it or later."""
        return [number for number, value in enumerate(self.values) if value.producer < call <= value.last_use]

    def same_path(self, other: Record) -> bool:
        """Return whether another pass made the same calls and operations."""
        return (
            [(one.name, one.result) for one in self.calls] == [(one.name, one.result) for one in other.calls]
            and [vars(one) for one in self.operations] == [vars(one) for one in other.operations]
            and len(self.values) == len(other.values)
        )


class Recorder(Watch):
    """Recorder of a forward pass."""

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module], changing: Iterable[str]) -> None:
        super().__init__()
        self.record = Record()
        self._model, self._layers = model, layers
        self._tensors = dict(model.named_buffers()) | dict(model.named_parameters())
        self._names = {id(tensor): name for name, tensor in self._tensors.items()}
        self._slots = {
            (id(module), key): self._names[id(tensor)]
            for module in model.modules()
            for key, tensor in (*own_parameters(module).items(), *own_buffers(module).items())
            if tensor is not None
        }
        self._changing = {*changing, *(name for name, _ in model.named_parameters())}
        self._objects: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        self._hidden = WeakTensorKeyDictionary()
        self._storages: list[Any] = []
        self._in_layer = False
        self._dispatched = 0
        self._drew = False

    def run(self, example: Any) -> Record:
        record = self.record
        record.inputs = map_leaves(self._input, example)
        before, drawn = _python_values(self._model), _drawn()
        self._python_draws, self._drawn = False, drawn
        with _Dispatch(self), self.watching(self._layers):
            output = self._model(example)
        self._watch_draws()
        for tensor in tensors_in(output):
            self.use(tensor)
            if id(tensor) in self._numbers:
                record.values[self._numbers[id(tensor)]].last_use = sys.maxsize
        if not tensors_in(output):
            raise InputError(f"{type(self._model).__name__} returns no tensor but {type(output).__name__}.")
        last = max(0, len(record.calls) - 1)
        for value in record.values:
            value.last_use = min(last, value.last_use)
        self._forbid_shared_memory()
        self._forbid_state(before)
        return record

    def _input(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        self._number(leaf, -1, is_whole_number=not leaf.is_floating_point())
        return Ref(self._numbers[id(leaf)])

    @property
    def _place(self) -> int:
        return max(0, len(self.record.calls) - 1)

    def _number(self, tensor: torch.Tensor, producer: int, is_whole_number: bool = False) -> None:
        self._numbers[id(tensor)] = len(self._objects)
        self._objects.append(tensor)
        self.record.values.append(
            Value(
                tuple(tensor.shape),
                tensor.dtype,
                tensor.device,
                tensor.requires_grad,
                producer,
                _storage(tensor),
                is_whole_number,
            )
        )

    def on_layer(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._watch_draws()
        self.record.calls.append(Call(name))
        self._in_layer = True
        for tensor in tensors_in((args, kwargs)):
            self.use(tensor)
        module = self._layers[name]
        self.record.uses[self._place] |= {
            self._slots[id(one), key]
            for one in module.modules()
            for key in (*own_parameters(one), *own_buffers(one))
            if (id(one), key) in self._slots
        }
        result = call(*args, **kwargs)
        self._in_layer = False
        self._drawn = _drawn()
        given = tree_leaves((args, kwargs))
        self.record.calls[-1].result = map_leaves(lambda leaf: self._leaf(leaf, given, name), result)
        return result

    def on_operation(self, function: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = tensors_in((args, kwargs))
        follows = any([self._follows(tensor) for tensor in given])
        before, self._drew = self._dispatched, False
        calls = len(self.record.calls)
        result = call(*args, **kwargs)
        if self._drew and not follows:
            self.record.draws.add(function)
        elif not follows:
            return result
        if (kind := _kind(function, result, self._dispatched > before)) is Kind.READ:
            self._read(given)
        made = map_leaves(lambda leaf: self._leaf(leaf, [], ""), result) if kind is Kind.VALUES else None
        self.record.operations.append(Operation(function, kind, made, calls))
        return result

    def _leaf(self, leaf: Any, given: list[Any], layer: str) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) in self._names:
                return Own(self._names[id(leaf)])
            if id(leaf) not in self._numbers:
                self._number(leaf, self._place)
            return Ref(self._numbers[id(leaf)])
        if isinstance(leaf, _CONSTANTS):
            return leaf
        for place, one in enumerate(given):
            if one is leaf:
                return Argument(place)
        raise InputError(
            f"Layer {layer!r} returns {type(leaf).__name__}, in which no tensor can be found. A model that is cut "
            f"needs tensors from each layer, in any nesting of tuples, lists, dicts and dataclasses."
        )

    def _follows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a value, a parameter or a buffer that changes, or needs a gradient."""
        if tensor in self._hidden and id(tensor) not in self._numbers and not tensor.requires_grad:
            layer = self.record.calls[self._hidden[tensor]].name
            raise InputError(
                f"{type(self._model).__name__} uses a tensor that its layer {layer!r} keeps instead of returning it: "
                f"after a cut it would be in another process. Return it from the layer."
            )
        return self._is_value(tensor)

    def _is_value(self, tensor: torch.Tensor) -> bool:
        number, name = self._numbers.get(id(tensor)), self._names.get(id(tensor))
        if number is not None:
            return not self.record.values[number].is_whole_number
        return tensor.requires_grad if name is None else name in self._changing

    def _read(self, given: list[torch.Tensor]) -> None:
        """Keep these tensors for all stages, because Python control flow depends on their numbers."""
        for tensor in given:
            if (number := self._numbers.get(id(tensor))) is not None:
                self.record.values[number].last_use = sys.maxsize
            elif self._follows(tensor):
                raise InputError(
                    f"{type(self._model).__name__} reads the numbers of "
                    f"{self._names.get(id(tensor), 'a tensor that a layer keeps')} between its layers, which other "
                    f"stages do not have: read them inside a layer."
                )

    def use(self, tensor: torch.Tensor) -> None:
        """Record that an operation, in a layer or between two layers, uses a tensor."""
        record, layer = self.record, self._place
        if (number := self._numbers.get(id(tensor))) is not None:
            value = record.values[number]
            again = value.is_whole_number and not self._in_layer
            value.last_use = sys.maxsize if again else max(value.last_use, layer)
        elif id(tensor) in self._names:
            record.uses[layer].add(self._names[id(tensor)])
        elif tensor in self._hidden:
            record.forbidden |= set(range(self._hidden[tensor] + 1, layer + 1))

    def dispatched(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record the effects of an operation that was run."""
        self._dispatched += 1
        self._drew |= torch.Tag.nondeterministic_seeded in function.tags
        for place in mutated_arguments(function):
            for tensor in tensors_in(args[place]) if place < len(args) else ():
                self.record.mutated[_storage(tensor)] = self._place
                self._storages.append(tensor.untyped_storage())  # keeps its id from being reused
        hidden = self._in_layer or any(self._is_value(one) or one in self._hidden for one in tensors_in((args, kwargs)))
        for tensor in tensors_in(result) if hidden else ():
            if id(tensor) not in self._numbers and id(tensor) not in self._names:
                self._hidden[tensor] = self._place

    def _forbid_shared_memory(self) -> None:
        """Forbid cuts after which a later in-place change would be seen on one side only."""
        record = self.record
        of_model = {_storage(self._tensors[name]) for name in self._changing}
        for call in range(1, len(record.calls)):
            storages = [record.values[number].storage for number in record.live_at(call)]
            live = Counter(storage for storage in storages if storage in record.mutated)
            if any(count > 1 and record.mutated[storage] >= call for storage, count in live.items()):
                record.forbidden.add(call)
        for value in record.values:
            if value.storage in of_model and value.storage in record.mutated:
                record.forbidden |= set(range(value.producer + 1, value.last_use + 1))

    def _forbid_state(self, before: dict[int, dict[str, Any]]) -> None:
        """Forbid cuts between two uses of a module or buffer that changes."""
        record = self.record
        users: dict[str, list[int]] = defaultdict(list)
        for layer, names in record.uses.items():
            for name in names & self._changing:
                if isinstance(self._tensors[name], nn.Parameter):
                    continue
                users[name].append(layer)
        now = _python_values(self._model)
        for layer, call in enumerate(record.calls):
            if any(now.get(id(one)) != before.get(id(one)) for one in self._layers[call.name].modules()):
                users[f"module {call.name}"].append(layer)
        for layers in users.values():
            record.forbidden |= set(range(min(layers) + 1, max(layers) + 1))

    def _watch_draws(self) -> None:
        """Forbid cuts after random draws of Python or NumPy between layers, because stages would draw again."""
        if self._python_draws or _drawn() != self._drawn:
            self._python_draws = True
            self.record.forbidden.add(len(self.record.calls))


class _Dispatch(UncompiledMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            self._recorder.use(tensor)
        result = function(*args, **(kwargs or {}))
        self._recorder.dispatched(function, args, kwargs, result)
        return result


def _kind(function: Any, result: Any, dispatched: bool) -> Kind:
    name = getattr(function, "__name__", "")
    if name in _HOOKS:
        return Kind.HOOK
    if tensors_in(result):
        return Kind.VALUES
    if name in _READS or (dispatched and result is not None):
        return Kind.READ
    return Kind.CHANGE if dispatched else Kind.METADATA


def _drawn() -> Any:
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    return random.getstate(), None if state is None else (state[2], state[1].tobytes())


def _python_values(model: nn.Module) -> dict[int, dict[str, Any]]:
    return {id(module): plain_attributes(module) for module in model.modules()}


def _storage(tensor: torch.Tensor) -> int:
    try:
        return storage_id(tensor)
    except (NotImplementedError, RuntimeError):  # sparse, or batched by vmap
        return id(tensor)
