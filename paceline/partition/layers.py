"""Which modules are layers, and which layer an operation of a trace belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem

from torch import fx, nn
from torch.nn.utils.parametrize import is_parametrized


@dataclass
class Layer:
    """A layer and its operations, in order."""

    name: str
    operations: list[fx.Node]


def assign_operations(operations: Sequence[fx.Node], model: nn.Module) -> list[Layer]:
    """Assign the operations to layers; each call of a module that is a layer begins one.

    Operations between two layers belong to the one before. A module called again is a new layer, with the number of
    the call after its name.
    """
    paths = {path for path, _ in model.named_modules(remove_duplicate=False)} - _containers(model)
    layers: list[Layer] = []
    calls: Counter[str] = Counter()
    seen = set()
    before: list[fx.Node] = []
    for node in operations:
        call, path = _call(node, paths)
        if path and call not in seen and node.target is not getitem:
            seen.add(call)
            calls[path] += 1
            layers.append(Layer(path if calls[path] == 1 else f"{path}:{calls[path]}", []))
        (layers[-1].operations if layers else before).append(node)
    if not layers:
        layers.append(Layer(type(model).__name__, []))
    layers[0].operations[:0] = before
    return layers


def _call(node: fx.Node, paths: set[str]) -> tuple[str, str]:
    """The call of a layer, one of ``paths``, that an operation is part of, and its path; empty if none."""
    for call, (path, _) in node.meta.get("nn_module_stack", {}).items():
        if path in paths:
            return call, path
    return "", ""


def _containers(model: nn.Module) -> set[str]:
    """The paths of the modules that are no layers themselves but contain layers."""
    found = {""}

    def visit(module: nn.Module, path: str, is_wrapper: bool) -> None:
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        is_wrapper = is_wrapper and len(children) == 1
        for name, child in children:
            if _is_container(child) or _has_blocks(child) or (is_wrapper and child._modules):
                child_path = f"{path}.{name}" if path else name
                found.add(child_path)
                visit(child, child_path, is_wrapper)

    visit(model, "", is_wrapper=True)
    return found


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


def _has_blocks(module: nn.Module) -> bool:
    """Whether it holds a list of modules that have submodules, as a transformer holds its blocks."""
    if is_parametrized(module):  # torch keeps its parametrizations in such a list
        return False
    children = [child for child in module._modules.values() if child is not None]
    blocks = [
        block for child in children if _is_container(child) for block in child._modules.values() if block is not None
    ]
    return any(block._modules for block in blocks) or any(map(_has_blocks, children))
