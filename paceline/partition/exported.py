"""Cuts any model that ``torch.export`` can trace: a stage is a slice of the operations it lists.

::

    operations   embedding  arange  embedding  add | layer_norm  linear ...  add | linear
    layers       embed      embed_place ---------- | blocks.0 ------------------ | head

The operations keep their order, and each is the one the model itself calls, with its own parameters and buffers, so
all numbers are the same, random ones included. An operation belongs to the layer whose call it is part of; the model's
own operations between two layers belong to the one before. A boundary is crossed by every tensor computed before it and
used after it. A symbolic size (of the batch, say) is read from a tensor that crosses, or is sent as a 0-dim tensor.

Where a cut would separate two values that share memory changed later, the layers around it are merged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from paceline.errors import InputError
from paceline.partition.base import Layers, Stage
from paceline.partition.exported_model import REMEDY, ExportedModel
from paceline.partition.flags import FlagValues, training_flags
from paceline.partition.graph import Trace
from paceline.partition.preserve import preserved


class ExportedCut(Layers):
    """The layers of an exported model; each mode (training, evaluation) is exported when it is first met."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        self._model = model
        self._example = example
        self._training = training_flags(model)
        self._traces: dict[FlagValues, Trace] = {}
        self.names = self.trace().names
        self.parameters = [name for name, _ in model.named_parameters()]
        self.buffers = [name for name, _ in model.named_buffers()]
        self._check_equal()

    def stage(self, begin: int, end: int) -> Stage:
        return _ExportedStage(self, begin, end)

    @property
    def is_ready(self) -> bool:
        return self.mode() in self._traces

    def prepare(self) -> None:
        self._check_hooks()
        self.trace()

    def mode(self) -> FlagValues:
        """Which modules are in training mode."""
        return self._training.current()

    def trace(self) -> Trace:
        """The trace of the model in its present mode."""
        mode = self.mode()
        if mode not in self._traces:
            self._traces[mode] = trace = Trace(self._model, self._example)
            if len(self._traces) > 1 and trace.names != self.names:
                raise InputError(
                    f"{type(self._model).__name__} has other layers now than when it was cut, as modules went from "
                    f"training to evaluation or back. Then: {', '.join(self.names)}; now: {', '.join(trace.names)}."
                )
        return self._traces[mode]

    def input_spec(self) -> _InputSpec:
        """What inputs the model can take."""
        return _InputSpec(self._model, self.trace().exported, self._example)

    def _check_equal(self) -> None:
        """Refuse a model that behaves differently while it is traced."""
        exported = self._run(self.stage(0, len(self.names)))
        eager = self._run(self._model)
        if not _equal(exported, eager) and _equal(eager, self._run(self._model)):
            raise InputError(
                f"{type(self._model).__name__} cannot be cut into stages: its operations, as torch.export lists them, "
                f"give other numbers than the model itself. {REMEDY}"
            )

    def _check_hooks(self) -> None:
        for name, module in self._model.named_modules():
            if module._backward_hooks or module._backward_pre_hooks:
                raise InputError(
                    f"The module {name or type(self._model).__name__!r} has a backward hook, which would not be "
                    f"called: torch.export does not list it among the operations. {REMEDY}"
                )

    def _run(self, forward: Callable[[Any], Any]) -> list[torch.Tensor]:
        """The outputs of a forward pass, and the buffers after it."""
        with preserved(self._model), torch.enable_grad():
            outputs = [leaf for leaf in tree_leaves(forward(self._example)) if isinstance(leaf, torch.Tensor)]
            return [tensor.detach().clone() for tensor in [*outputs, *self._model.buffers()]]


class _ExportedStage(Stage):
    def __init__(self, layers: ExportedCut, begin: int, end: int) -> None:
        self._layers = layers
        self._bounds = begin, end
        self._by_mode: dict[FlagValues, _StageInMode] = {}
        names = self._in_mode().names
        self.parameters = [name for name in layers.parameters if name in names]
        self.buffers = [name for name in layers.buffers if name in names]

    def _in_mode(self) -> _StageInMode:
        mode = self._layers.mode()
        if mode not in self._by_mode:
            self._by_mode[mode] = _StageInMode(self._layers, *self._bounds)
        return self._by_mode[mode]

    def __call__(self, values: Any) -> Any:
        return self._in_mode()(values)


class _StageInMode:
    """A stage in one mode. ``names``: of the parameters and buffers it uses."""

    def __init__(self, layers: ExportedCut, begin: int, end: int) -> None:
        trace = layers.trace()
        exported = trace.exported
        built = _StageGraph(trace, begin, end)
        self._run = fx.GraphModule(exported.root, built.graph)
        self._tensors = [exported.tensors[node] for node in built.tensors]
        self._assigned = [exported.tensors[node] for node in built.assigned]
        self._input_spec = layers.input_spec() if begin == 0 else None
        self._output_spec = exported.output_spec if end == len(trace.names) else None
        self.names = {exported.names[node] for node in built.tensors if node in exported.names}

    def __call__(self, values: Any) -> Any:
        given = values if self._input_spec is None else self._input_spec.leaves(values)
        tensors = [value if isinstance(value, torch.Tensor) else getattr(*value) for value in self._tensors]
        returned = self._run(*tensors, *given)
        assigned = len(self._assigned)
        for (module, key), value in zip(self._assigned, returned[:assigned], strict=True):
            module._buffers[key] = value
        rest = returned[assigned:]
        return rest if self._output_spec is None else tree_unflatten(rest, self._output_spec)


class _StageGraph:
    """Copies the operations of a stage into a graph.

    ``tensors``: the parameters, buffers and constants it takes, before the activations.
    ``assigned``: the buffers whose new values it returns, before the outputs.
    """

    def __init__(self, trace: Trace, begin: int, end: int) -> None:
        self.graph = fx.Graph()
        self._trace = trace
        self._begin = begin
        self._copies: dict[fx.Node, fx.Node] = {}
        exported, operations = trace.exported, trace.operations(begin, end)
        pairs = [(buffer, value) for buffer, value in exported.assigned if begin <= max(0, trace.producer(value)) < end]
        self.assigned = [buffer for buffer, _ in pairs]
        last = end == len(trace.names)
        returned = exported.output if last else trace.live_at(end)
        needed = {one for node in operations for one in node.all_input_nodes} | {value for _, value in pairs}
        needed |= {leaf for leaf in returned if isinstance(leaf, fx.Node)}
        self.tensors = [node for node in exported.tensors if node in needed]
        for node in self.tensors:
            self._copies[node] = self.graph.placeholder(node.name)
        self._add_inputs(operations)
        for node in operations:
            self._copies[node] = self.graph.node_copy(node, self._copy_of)
        outputs = [self._copy_of(value) for _, value in pairs]
        outputs += [fx.map_arg(leaf, self._copy_of) for leaf in returned] if last else self._outputs(returned)
        self.graph.output(tuple(outputs))

    def _copy_of(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr" and node not in self._copies:
            self._copies[node] = self.graph.node_copy(node)
        return self._copies[node]

    def _add_inputs(self, operations: list[fx.Node]) -> None:
        """Add placeholders; clone what is changed in place, as autograd forbids that for leaves with a gradient."""
        if self._begin == 0:
            for node in self._trace.exported.inputs:
                self._copies[node] = self.graph.placeholder(node.name)
            return
        boundary = _Boundary(self._trace.live_at(self._begin))
        for node in [*boundary.tensors, *boundary.numbers]:
            self._copies[node] = self.graph.placeholder(node.name)
        aliasing = self._trace.aliasing
        mutated = {aliasing.alias_set(value) for node in operations for value in aliasing.mutations.get(node, ())}
        for node in boundary.tensors:
            if aliasing.alias_set(node) in mutated:
                self._copies[node] = self.graph.call_function(torch.clone, (self._copies[node],))
        for node in boundary.numbers:
            self._copies[node] = self.graph.call_method("item", (self._copies[node],))
        for node, (tensor, dim) in boundary.sizes.items():
            self._copies[node] = self.graph.call_function(torch.ops.aten.sym_size.int, (self._copies[tensor], dim))

    def _outputs(self, nodes: list[fx.Node]) -> list[fx.Node]:
        boundary = _Boundary(nodes)
        device = boundary.tensors[0].meta["val"].device
        return [self._copies[node] for node in boundary.tensors] + [
            self.graph.call_function(torch.tensor, (self._copies[node],), {"device": device})
            for node in boundary.numbers
        ]


class _Boundary:
    """How the values live at a boundary cross it.

    ``tensors``: sent first. ``numbers``: sent after them, as tensors. ``sizes``: numbers that are read from the size of
    a tensor, as that tensor and dim.
    """

    def __init__(self, nodes: list[fx.Node]) -> None:
        self.tensors = [node for node in nodes if isinstance(node.meta["val"], torch.Tensor)]
        places = {
            str(size): (node, dim)
            for node in self.tensors
            for dim, size in enumerate(node.meta["val"].shape)
            if isinstance(size, torch.SymInt)
        }
        numbers = [node for node in nodes if node not in self.tensors]
        self.sizes = {node: places[str(node.meta["val"])] for node in numbers if str(node.meta["val"]) in places}
        self.numbers = [node for node in numbers if node not in self.sizes]


class _InputSpec:
    """Checks that the model's input is like the one it was traced with."""

    def __init__(self, model: nn.Module, exported: ExportedModel, example: Any) -> None:
        self._model = type(model).__name__
        self._ranges = exported.ranges
        self._shapes = [
            node.meta["val"].shape if isinstance(node.meta["val"], torch.Tensor) else None for node in exported.inputs
        ]
        self._example, self._spec = tree_flatten(((example,), {}))

    def leaves(self, values: Any) -> list[Any]:
        """The leaves of an input, one for each placeholder."""
        leaves, spec = tree_flatten(((values,), {}))
        if spec != self._spec or not all(map(self._fits, leaves, self._shapes, self._example)):
            example = tree_unflatten(self._example, self._spec)[0][0]
            raise InputError(
                f"{self._model} was traced with {_describe(example)}, but got {_describe(values)}. A traced "
                f"model takes inputs that differ in the number of samples only: pad the samples to one size. If its "
                f"forward depends on the number of samples: {REMEDY[0].lower()}{REMEDY[1:]}"
            )
        return leaves

    def _fits(self, leaf: Any, shape: torch.Size | None, example: Any) -> bool:
        if shape is None:
            return bool(leaf == example)
        return (
            isinstance(leaf, torch.Tensor)
            and leaf.dtype == example.dtype
            and leaf.ndim == len(shape)
            and all(map(self._size_fits, leaf.shape, shape))
        )

    def _size_fits(self, size: int, traced: int | torch.SymInt) -> bool:
        if str(traced).isdigit():
            return size == traced
        limits = self._ranges.get(str(traced))
        return limits is None or bool((limits.lower <= 2 or size >= limits.lower) and size <= limits.upper)


def _equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(left, right, strict=True))


def _describe(values: Any) -> str:
    def one(leaf: Any) -> str:
        return (
            f"a tensor of shape {list(leaf.shape)} and {leaf.dtype}" if isinstance(leaf, torch.Tensor) else repr(leaf)
        )

    return ", ".join(map(one, tree_leaves(values)))
