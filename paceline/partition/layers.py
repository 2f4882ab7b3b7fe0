"""Which modules are layers, and which module an operation of a trace belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem

from torch import fx, nn
from torch.nn.utils.parametrize import is_parametrized


@dataclass
class Run:
    """The operations of a layer, in their order."""

    name: str
    operations: list[fx.Node]


def runs_of(operations: Sequence[fx.Node], model: nn.Module) -> list[Run]:
    """Share the operations out to layers: a layer begins where a module is called that is one.

    What is called between two layers belongs to the one before. A module that is called again is a layer again, with
    the number of the call after its name.
    """
    paths = {path for path, _ in model.named_modules(remove_duplicate=False)} - _opened(model)
    runs: list[Run] = []
    calls: Counter[str] = Counter()
    seen = set()
    before: list[fx.Node] = []
    for node in operations:
        call, path = _call(node, paths)
        if path and call not in seen and node.target is not getitem:
            seen.add(call)
            calls[path] += 1
            runs.append(Run(path if calls[path] == 1 else f"{path}:{calls[path]}", []))
        (runs[-1].operations if runs else before).append(node)
    if not runs:
        runs.append(Run(type(model).__name__, []))
    runs[0].operations[:0] = before
    return runs


def _call(node: fx.Node, paths: set[str]) -> tuple[str, str]:
    """The call of a layer (``paths`` are those of all) that an operation is part of, and its path; or nothing."""
    for call, (path, _) in node.meta.get("nn_module_stack", {}).items():
        if path in paths:
            return call, path
    return "", ""


def _opened(model: nn.Module) -> set[str]:
    """The paths of the modules that are not layers, but consist of layers."""
    opened = {""}

    def visit(module: nn.Module, path: str, alone: bool) -> None:
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        alone = alone and len(children) == 1
        for name, child in children:
            if _is_container(child) or _has_blocks(child) or (alone and child._modules):
                inside = f"{path}.{name}" if path else name
                opened.add(inside)
                visit(child, inside, alone)

    visit(model, "", alone=True)
    return opened


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


def _has_blocks(module: nn.Module) -> bool:
    """Whether it holds a list of modules that consist of modules, as a transformer holds its blocks."""
    if is_parametrized(module):  # its weights are made by modules, in a list of their own
        return False
    children = [child for child in module._modules.values() if child is not None]
    blocks = [
        block for child in children if _is_container(child) for block in child._modules.values() if block is not None
    ]
    return any(block._modules for block in blocks) or any(map(_has_blocks, children))
