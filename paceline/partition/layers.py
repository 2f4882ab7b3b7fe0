"""Choice of the modules that are layers of a model."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from paceline.system.torch_internals import has_backward_hooks, own_modules


def layer_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that can be layers, by name, including those inside other layers."""
    containers = _containers(model)
    return {name: module for name, module in model.named_modules() if name not in containers}


def outermost(layers: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the layers that are not inside another layer."""
    found: dict[str, nn.Module] = {}
    for name, module in layers.items():  # in the order of named_modules: parents first
        if found.keys().isdisjoint(_parents(name)):
            found[name] = module
    return found


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _containers(model: nn.Module) -> set[str]:
    """Return the paths of the modules that are not layers themselves but contain layers."""
    found = {""}

    def visit(module: nn.Module, path: str, is_wrapper: bool) -> None:
        children = [(name, child) for name, child in own_modules(module).items() if child is not None]
        is_wrapper = is_wrapper and len(children) == 1
        for name, child in children:
            if _is_open(child) and (_is_container(child) or _has_blocks(child) or (is_wrapper and own_modules(child))):
                child_path = f"{path}.{name}" if path else name
                found.add(child_path)
                visit(child, child_path, is_wrapper)

    visit(model, "", is_wrapper=True)
    return found


def _is_open(module: nn.Module) -> bool:
    """Return whether a module may span several stages. Backward hooks would see the gradients of one stage only."""
    return not has_backward_hooks(module)


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


def _has_blocks(module: nn.Module) -> bool:
    """Return whether a module holds a list of modules with submodules, as a transformer holds its blocks."""
    if is_parametrized(module):  # torch keeps its parametrizations in such a list
        return False
    children = [child for child in own_modules(module).values() if child is not None]
    held = [block for child in children if _is_container(child) for block in own_modules(child).values()]
    return any(block is not None and own_modules(block) for block in held) or any(map(_has_blocks, children))
