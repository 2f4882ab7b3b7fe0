"""The operations of a model, as listed by ``torch.export``."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map, tree_map_only, tree_unflatten

from paceline.data.keys import generator_states, same_states
from paceline.errors import InputError
from paceline.partition.base import dataclass_remedy, tensor_names
from paceline.partition.preserve import preserved
from paceline.user_code import user_frames

REMEDY = "Write the model as nn.Sequential of its blocks, which may do anything, or do not cut it."
_DROPPED = {torch.ops.aten._assert_tensor_metadata.default}  # wrong under autocast, which is not traced


class ExportedModel:
    """The exported graph of a model.

    Attributes:
        operations: in execution order.
        inputs: the placeholders of the model's input leaves.
        output: the leaves of the model's output.
        tensors: each parameter and buffer as its module and its key there; each constant itself.
        names: of the parameters and buffers, in the model.
        assigned: pairs of a buffer and the value that replaces it.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        exported = _export(model, example)
        self.root = exported.graph_module
        self.output_spec: TreeSpec = exported.call_spec.out_spec
        self.ranges = {str(symbol): found for symbol, found in exported.range_constraints.items()}
        self.inputs: list[fx.Node] = []
        self.tensors: dict[fx.Node, tuple[nn.Module, str] | torch.Tensor] = {}
        self.names: dict[fx.Node, str] = {}
        self.assigned: list[tuple[fx.Node, fx.Node]] = []
        self.operations: list[fx.Node] = []
        self._read_inputs(exported, model)
        for node in exported.graph.nodes:
            if node.op != "call_function" or node.target in _DROPPED:
                continue
            if self._is_assignment(node):
                self.assigned.append((node.args[0], node.args[1]))
            else:
                self.operations.append(node)
        output = next(node for node in reversed(exported.graph.nodes) if node.op == "output")
        kinds = [spec.kind for spec in exported.graph_signature.output_specs]
        assert set(kinds) <= {OutputKind.USER_OUTPUT}, kinds
        self.output: list[Any] = list(output.args[0])
        if not any(isinstance(leaf, fx.Node) for leaf in self.output):
            raise InputError(
                f"{type(model).__name__} returns no tensor but "
                f"{type(tree_unflatten(self.output, self.output_spec)).__name__}."
            )

    def _read_inputs(self, exported: ExportedProgram, model: nn.Module) -> None:
        nodes = {node.name: node for node in exported.graph.nodes}
        names = tensor_names(model)
        for spec in exported.graph_signature.input_specs:
            node = nodes[spec.arg.name]
            if spec.kind is InputKind.USER_INPUT:
                self.inputs.append(node)
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                path, _, key = str(spec.target).rpartition(".")
                module = model.get_submodule(path)
                self.tensors[node] = module, key
                self.names[node] = names[id(getattr(module, key))]
            else:
                self.tensors[node] = exported.constants[str(spec.target)]

    def _is_assignment(self, node: fx.Node) -> bool:
        """Whether this is ``self.buffer = value``, which torch.export turns into a copy."""
        called = node.meta.get("torch_fn", ("", ""))[1]
        copies = node.target is torch.ops.aten.copy_.default and not called.endswith("copy_")
        return copies and node.args[0] in self.names


def _export(model: nn.Module, example: Any) -> ExportedProgram:
    samples = _two_samples(example)
    dims = tree_map(lambda leaf: {0: Dim.AUTO} if isinstance(leaf, torch.Tensor) and leaf.ndim else None, samples)
    seen = [samples]

    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        if module is model:
            seen.append(output)

    with preserved(model):
        before = generator_states()
        hook = register_module_forward_hook(record)
        try:
            with _silenced(), torch.enable_grad():
                exported = torch.export.export(model, (samples,), dynamic_shapes=(dims,), strict=False)
        except Exception as error:
            why = dataclass_remedy(seen) or f"{_reason(error)}. {REMEDY}"
            raise InputError(
                f"{type(model).__name__} cannot be cut into stages, as torch.export cannot trace it: {why}"
            ) from error
        finally:
            hook.remove()
        if not same_states({**generator_states(), "torch": before["torch"]}, before):
            raise InputError(
                f"{type(model).__name__} cannot be cut into stages: its forward draws random numbers from Python "
                f"or NumPy, and a trace would repeat those it drew while tracing. Draw with torch. {REMEDY}"
            )
    return exported


def _two_samples(example: Any) -> Any:
    """Double a batch of one sample: torch.export would take its size for a constant."""
    sizes = {leaf.shape[0] for leaf in tree_leaves(example) if isinstance(leaf, torch.Tensor) and leaf.ndim}
    if sizes != {1}:
        return example
    return tree_map_only(torch.Tensor, lambda leaf: torch.cat([leaf, leaf]) if leaf.ndim else leaf, example)


@contextmanager
def _silenced() -> Iterator[None]:
    """Suppress the pages that a failed export logs besides its error."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.filterwarnings("ignore", message="The tensor attributes? .* assigned during export")
            yield
    finally:
        logging.disable(level)


def _reason(error: Exception) -> str:
    """What torch.export could not trace, and where, in one line."""
    frames = user_frames(error.__traceback__)
    where = f"{frames[-1].line!r} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else "a line"
    if "DataDependent" in type(error).__name__:
        return f"{where} depends on the values of tensors"
    text = str(error).strip().splitlines()
    return f"{where} ends in {type(error).__name__}: {text[0] if text else ''}".rstrip(": .")
