"""Any model that can be traced: ``torch.export`` lists its operations, and a stage is a run of them.

::

    operations   embedding  arange  embedding  add | layer_norm  linear ...  add | linear
    layers       embed      embed_place ---------- | blocks.0 ------------------ | head

The operations keep their order, and each is the one that the model itself calls, with its own parameters and buffers,
so every number is the same, drawn numbers included. An operation belongs to the module that called it; one of the
model's own between two modules belongs to the one before. What crosses a boundary is every tensor that is made before
it and used after it. A size (of the batch, say) is read from a tensor that crosses, or crosses as a tensor of no dims.

Where a cut would part two values that share memory which is changed later, the layers around it are one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from paceline.data.keys import kept_states
from paceline.errors import InputError
from paceline.partition.base import Layers, Stage
from paceline.partition.flags import Flags, Mode
from paceline.partition.graph import Trace
from paceline.partition.preserve import untouched
from paceline.partition.program import WAY_OUT, ExportedModel


class ExportedCut(Layers):
    """The layers of a model, found by a trace; another mode (training, evaluation) is traced when it is first met."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        self._model = model
        self._example = example
        self._modes = Flags(model)
        self._traces: dict[Mode, Trace] = {}
        self.names = self.trace().names
        self.parameters = [name for name, _ in model.named_parameters()]
        self.buffers = [name for name, _ in model.named_buffers()]
        self._check_same()

    def stage(self, begin: int, end: int) -> Stage:
        return _TracedStage(self, begin, end)

    @property
    def known(self) -> bool:
        return self.mode() in self._traces

    def learn(self) -> None:
        self._check_hooks()
        self.trace()

    def mode(self) -> Mode:
        """Which modules train, and which do not."""
        return self._modes.now()

    def trace(self) -> Trace:
        """The trace of the model as it is."""
        mode = self.mode()
        if mode not in self._traces:
            self._traces[mode] = trace = Trace(self._model, self._example)
            if len(self._traces) > 1 and trace.names != self.names:
                raise InputError(
                    f"{type(self._model).__name__} has other layers now than when it was cut, as modules went from "
                    f"training to evaluation or back. Then: {', '.join(self.names)}; now: {', '.join(trace.names)}."
                )
        return self._traces[mode]

    def _check_same(self) -> None:
        """A module may do something else while it is traced; then it is not the model that would be trained."""
        traced = self._outcome(self.stage(0, len(self.names)))
        plain = self._outcome(self._model)
        if not _same(traced, plain) and _same(plain, self._outcome(self._model)):
            raise InputError(
                f"{type(self._model).__name__} cannot be cut into stages: its operations, as torch.export lists them, "
                f"give other numbers than the model itself. {WAY_OUT}"
            )

    def _check_hooks(self) -> None:
        for name, module in self._model.named_modules():
            if module._backward_hooks or module._backward_pre_hooks:
                raise InputError(
                    f"The module {name or type(self._model).__name__!r} has a backward hook, which torch.export "
                    f"does not list among the operations, so it would not be called. {WAY_OUT}"
                )

    def _outcome(self, forward: Callable[[Any], Any]) -> list[torch.Tensor]:
        """What a forward pass returns, and what it makes of the buffers."""
        with untouched(self._model), kept_states(), torch.enable_grad():
            leaves = tree_leaves(forward(self._example))
            made = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            return [tensor.detach().clone() for tensor in [*made, *self._model.buffers()]]

    def inputs(self) -> _Inputs:
        """What the model may be given."""
        return _Inputs(self._model, self.trace().program, self._example)


class _TracedStage(Stage):
    def __init__(self, layers: ExportedCut, begin: int, end: int) -> None:
        self._layers = layers
        self._bounds = begin, end
        self._graphs: dict[Mode, _Runnable] = {}
        graph = self._graph()
        self.parameters = [name for name in layers.parameters if name in graph.names]
        self.buffers = [name for name in layers.buffers if name in graph.names]

    def _graph(self) -> _Runnable:
        mode = self._layers.mode()
        if mode not in self._graphs:
            self._graphs[mode] = _Runnable(self._layers, *self._bounds)
        return self._graphs[mode]

    def __call__(self, values: Any) -> Any:
        return self._graph()(values)


class _Runnable:
    """A stage in one mode. ``names``: of the parameters and buffers that it computes with."""

    def __init__(self, layers: ExportedCut, begin: int, end: int) -> None:
        trace = layers.trace()
        program = trace.program
        built = _Graph(trace, begin, end)
        self._run = fx.GraphModule(program.root, built.graph)
        self._held = [program.tensors[node] for node in built.held]
        self._assigned = [program.tensors[node] for node in built.assigned]
        self._inputs = layers.inputs() if begin == 0 else None
        self._output_spec = program.output_spec if end == len(trace.names) else None
        self.names = {program.names[node] for node in built.held if node in program.names}

    def __call__(self, values: Any) -> Any:
        given = values if self._inputs is None else self._inputs.leaves(values)
        held = [value if isinstance(value, torch.Tensor) else getattr(*value) for value in self._held]
        returned = self._run(*held, *given)
        assigned = len(self._assigned)
        for (module, key), value in zip(self._assigned, returned[:assigned], strict=True):
            module._buffers[key] = value
        rest = returned[assigned:]
        return rest if self._output_spec is None else tree_unflatten(rest, self._output_spec)


class _Graph:
    """The operations of a stage as a graph of its own.

    ``held``: the parameters, buffers and constants that it is called with, before the values that cross.
    ``assigned``: the buffers whose new values it returns, before the others.
    """

    def __init__(self, trace: Trace, begin: int, end: int) -> None:
        self.graph = fx.Graph()
        self._trace = trace
        self._begin = begin
        self._mine: dict[fx.Node, fx.Node] = {}
        program, operations = trace.program, trace.operations(begin, end)
        pairs = [(buffer, value) for buffer, value in program.assigned if begin <= max(0, trace.made(value)) < end]
        self.assigned = [buffer for buffer, _ in pairs]
        last = end == len(trace.names)
        returned = program.output if last else trace.crossing(end)
        needed = {one for node in operations for one in node.all_input_nodes} | {value for _, value in pairs}
        needed |= {leaf for leaf in returned if isinstance(leaf, fx.Node)}
        self.held = [node for node in program.tensors if node in needed]
        for node in self.held:
            self._mine[node] = self.graph.placeholder(node.name)
        self._enter(operations)
        for node in operations:
            self._mine[node] = self.graph.node_copy(node, self._value)
        outputs = [self._value(value) for _, value in pairs]
        outputs += [fx.map_arg(leaf, self._value) for leaf in returned] if last else self._sent(returned)
        self.graph.output(tuple(outputs))

    def _value(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr" and node not in self._mine:
            self._mine[node] = self.graph.node_copy(node)
        return self._mine[node]

    def _enter(self, operations: list[fx.Node]) -> None:
        """Take what crosses; a tensor that is changed in place is a copy, as it may require a gradient."""
        if self._begin == 0:
            for node in self._trace.program.inputs:
                self._mine[node] = self.graph.placeholder(node.name)
            return
        crossing = _Crossing(self._trace.crossing(self._begin))
        for node in crossing.sent:
            self._mine[node] = self.graph.placeholder(node.name)
        aliases = self._trace.aliases
        changed = {aliases.group(value) for node in operations for value in aliases.changes.get(node, ())}
        for node in crossing.tensors:
            if aliases.group(node) in changed:
                self._mine[node] = self.graph.call_function(torch.clone, (self._mine[node],))
        for node in crossing.sent[len(crossing.tensors) :]:
            self._mine[node] = self.graph.call_method("item", (self._mine[node],))
        for node, (tensor, dim) in crossing.read.items():
            self._mine[node] = self.graph.call_function(torch.ops.aten.sym_size.int, (self._mine[tensor], dim))

    def _sent(self, nodes: list[fx.Node]) -> list[fx.Node]:
        crossing = _Crossing(nodes)
        device = crossing.tensors[0].meta["val"].device
        numbers = crossing.sent[len(crossing.tensors) :]
        return [self._mine[node] for node in crossing.tensors] + [
            self.graph.call_function(torch.tensor, (self._mine[node],), {"device": device}) for node in numbers
        ]


class _Crossing:
    """How values cross a boundary.

    ``sent``: what is sent, the ``tensors`` before the numbers. ``read``: the numbers that are the size of a tensor.
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
        self.read = {node: places[str(node.meta["val"])] for node in numbers if str(node.meta["val"]) in places}
        self.sent = self.tensors + [node for node in numbers if node not in self.read]


class _Inputs:
    """The input of the model, which must be like the one that it was traced with."""

    def __init__(self, model: nn.Module, program: ExportedModel, example: Any) -> None:
        self._model = type(model).__name__
        self._ranges = program.ranges
        self._shapes = [
            node.meta["val"].shape if isinstance(node.meta["val"], torch.Tensor) else None for node in program.inputs
        ]
        self._example, self._spec = tree_flatten(((example,), {}))

    def leaves(self, values: Any) -> list[Any]:
        """Its leaves, one for each input of the trace."""
        leaves, spec = tree_flatten(((values,), {}))
        if spec != self._spec or not all(map(self._fits, leaves, self._shapes, self._example)):
            example = tree_unflatten(self._example, self._spec)[0][0]
            raise InputError(
                f"{self._model} was traced with {_shown(example)}, and is given {_shown(values)}. A model that is cut "
                f"by a trace takes inputs that differ in the number of samples only: pad the samples to one size. If "
                f"its forward depends on the number of samples: {WAY_OUT[0].lower()}{WAY_OUT[1:]}"
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
        found = self._ranges.get(str(traced))
        return found is None or bool((found.lower <= 2 or size >= found.lower) and size <= found.upper)


def _same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(left, right, strict=True))


def _shown(values: Any) -> str:
    def one(leaf: Any) -> str:
        return (
            f"a tensor of shape {list(leaf.shape)} and {leaf.dtype}" if isinstance(leaf, torch.Tensor) else repr(leaf)
        )

    return ", ".join(map(one, tree_leaves(values)))
