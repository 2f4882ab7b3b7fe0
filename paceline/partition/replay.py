"""Replay of the layers of one stage by the model's own forward pass.

The forward pass runs as it is written, up to the end of the stage. Everything before the stage is skipped: a layer, or
an operation on values, returns the received tensors, or placeholders that have a shape but no numbers::

    layers      embed      blocks.0   blocks.1   blocks.2   head
    stage 1     skipped    skipped    runs       runs       ends the pass

So the stage does exactly what the model does, including hooks, custom functions, and any decision of Python inside a
layer. Decisions of Python between two layers must be the same as in the recorded pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from paceline.data.nested import map_leaves, tensors_in
from paceline.errors import InputError
from paceline.partition.layers import outermost
from paceline.partition.recording import Argument, Kind, Own, Record, Ref
from paceline.partition.watch import Watch
from paceline.system.torch_internals import no_torch_function, own_buffers, tree_leaves, wrapper_tensor

_VALUE = "_paceline_value"  # attribute that marks a tensor as a value, or as computed from a value


class Placeholder(torch.Tensor):
    """Tensor of another stage, which has a shape but no numbers."""

    @staticmethod
    def __new__(cls, shape: Any, dtype: torch.dtype, device: torch.device, requires_grad: bool = False) -> Placeholder:
        return wrapper_tensor(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise InputError(
            f"The model cannot be cut here: before the first layer of a stage it computes {function} from tensors of "
            f"the stages before, in a way that cannot be seen from outside. Cut elsewhere (pipeline.cut), or move it "
            f"into a layer."
        )


class Reached(BaseException):
    """End of a stage. It is not an ``Exception``, so that a model does not catch it as an error."""


class Section:
    """Layers of one stage, in one mode of the model."""

    def __init__(
        self,
        model: nn.Module,
        layers: dict[str, nn.Module],
        record: Record,
        bounds: tuple[int, int],  # first call of the stage, and the call that ends the stage
        changing: Iterable[str],
    ) -> None:
        self.model = model
        self.layers = outermost(layers) | {call.name: layers[call.name] for call in record.calls}
        self.record = record
        self.begin, self.end = bounds
        self.received, self.sent = record.live_at(self.begin), record.live_at(self.end)
        self.parameters = dict(model.named_parameters())
        self.own = {name for call in range(self.begin, max(self.end, 1)) for name in record.uses[call]}
        self.buffers = {name: slot_of(model, name) for name in changing}
        self.shapes = {id(one): one.shape for name, one in self.parameters.items() if name not in self.own}
        self.follows = frozenset(map(id, self.parameters.values()))


class Replay(Watch):
    """Pass of a stage; ``shape_of`` returns the shape of a value in it."""

    def __init__(self, section: Section, shape_of: Callable[[int], tuple[int, ...]]) -> None:
        super().__init__()
        self._section = section
        self._record = section.record
        self._shape_of = shape_of
        self._buffers = [(module, key, own_buffers(module)[key]) for module, key in section.buffers.values()]
        self._follows = section.follows | {id(buffer) for _, _, buffer in self._buffers}
        self._objects: dict[int, torch.Tensor] = {}
        self._calls = 0
        self._operations = 0

    def receive(self, values: Iterable[torch.Tensor]) -> Any:
        """Store the tensors that the previous stage sent. Returns the input for the model."""
        for number, tensor in zip(self._section.received, values, strict=True):
            value = self._record.values[number]
            if self._record.mutated.get(value.storage, -1) >= self._section.begin:
                tensor = tensor.clone()  # autograd forbids in-place changes of a leaf that requires a gradient
            self._keep(number, tensor)
        return map_leaves(self._rebuild, self._record.inputs)

    def accept(self, example: Any) -> None:
        """Store the tensors in the model's input that this stage or the next one needs."""
        self._note(example, self._record.inputs)

    def run(self, values: Any) -> Any:
        try:
            with self.watching(self._section.layers):
                output = self._section.model(values)
        except Reached:
            if any(number not in self._objects for number in self._section.sent):
                self._refuse("does not compute a tensor that the next stage needs")
            return tuple(self._objects[number] for number in self._section.sent)
        if self._section.end < len(self._record.calls):
            self._refuse(f"ends before layer {self._record.calls[self._section.end].name!r}")
        return output

    def on_layer(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        index = self._calls
        expected = self._record.calls[index].name if index < len(self._record.calls) else "none"
        if name != expected:
            self._refuse(f"calls layer {name!r} where it called {expected!r}")
        if index == self._section.end:
            raise Reached
        self._calls += 1
        result = self._record.calls[index].result
        if index == self._section.begin:
            for module, key, buffer in self._buffers:  # code before the stage may have assigned other buffers
                own_buffers(module)[key] = buffer
        if index < self._section.begin:
            given = tree_leaves((args, kwargs))
            return map_leaves(lambda leaf: given[leaf] if isinstance(leaf, Argument) else self._rebuild(leaf), result)
        output = call(*args, **kwargs)
        self._note(output, result)
        return output

    def on_operation(self, function: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self._use_values((args, kwargs)) and function not in self._record.draws:
            return call(*args, **kwargs)
        index = self._operations
        self._operations += 1
        known = self._record.operations[index] if index < len(self._record.operations) else None
        is_last = self._section.end == len(self._record.calls)
        skipped = self._calls <= self._section.begin and self._section.begin > 0
        if known is None or known.function != function or known.calls != self._calls:
            if is_last and not skipped:
                return call(*args, **kwargs)
            self._refuse(f"computes {_name(function)} where it computed {_name(known and known.function)}")
        assert known is not None
        if known.kind is Kind.METADATA:
            return call(*map_leaves(self._present, args), **kwargs)
        if not skipped:
            output = call(*args, **kwargs)
            self._note(output, known.result)
            return output
        if known.kind is Kind.HOOK:
            return call(Placeholder((), torch.float32, torch.device("cpu"), requires_grad=True), *args[1:], **kwargs)
        return call(*args, **kwargs) if known.kind is Kind.READ else map_leaves(self._rebuild, known.result)

    def _use_values(self, values: Any) -> bool:
        return any(
            tensor.requires_grad or hasattr(tensor, _VALUE) or id(tensor) in self._follows
            for tensor in tensors_in(values)
        )

    def _present(self, leaf: Any) -> Any:
        """Return a placeholder with the right shape for a parameter that this worker does not have."""
        shape = self._section.shapes.get(id(leaf))
        if shape is None or leaf.shape == shape:
            return leaf
        return Placeholder(shape, leaf.dtype, leaf.device, leaf.requires_grad)

    def _rebuild(self, leaf: Any) -> Any:
        if isinstance(leaf, Own):
            module, key = slot_of(self._section.model, leaf)
            return getattr(module, key)
        if not isinstance(leaf, Ref):
            return leaf
        if leaf not in self._objects:
            value = self._record.values[leaf]
            self._keep(leaf, Placeholder(self._shape_of(leaf), value.dtype, value.device, value.requires_grad))
        return self._objects[leaf]

    def _note(self, output: Any, template: Any) -> None:
        """Mark values, and keep those that the next stage needs."""
        refs: list[Any] = []
        map_leaves(lambda leaf: refs.append(leaf) if isinstance(leaf, Ref | Own) else None, template)
        tensors = tensors_in(output)
        if len(tensors) != len(refs):
            self._refuse(f"gets {len(tensors)} tensors where it got {len(refs)}")
        for ref, tensor in zip(refs, tensors, strict=True):
            if isinstance(ref, Ref):
                self._keep(ref, tensor)

    def _keep(self, number: int, tensor: torch.Tensor) -> None:
        if not self._record.values[number].is_whole_number:
            setattr(tensor, _VALUE, number)
        if number in self._section.sent or self._record.values[number].producer < self._section.begin:
            self._objects[number] = tensor

    def _refuse(self, what: str) -> None:
        layer = self._record.calls[max(0, self._calls - 1)].name
        raise InputError(
            f"After layer {layer!r} the model {what} for the microbatch with which it was cut: its work between the "
            f"layers depends on the data. Move the decision into a layer, because the work of a layer may depend on "
            f"the data, or choose pipeline.cut so that it is in the last stage."
        )


def slot_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that has a parameter or buffer, and its key in the module."""
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def _name(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    return str(getattr(owner, "__name__", None) or getattr(function, "__name__", "nothing"))
