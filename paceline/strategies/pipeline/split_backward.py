"""Backward pass split in two: first the gradients of the inputs (B), later those of the weights (W).

After Qi et al. 2024 (zero bubble, arXiv 2401.10241) and torch.distributed.pipelining: the first half keeps the
gradients at the intermediates, the nodes where the path to the weights leaves the path to the inputs. The second half
starts from them, so nothing is computed twice.

::

    output -- I -- I -- I -- input        I   a node on the path to the inputs: first half
              |         |                 W   a node that leads to weights only: second half
              W         W

Weights whose gradients cannot be deferred are computed in the first half, and the second half only stores them. These
are weights that the loss reaches without passing an intermediate, and weights with one intermediate below another,
because the path from the upper one to the weight crosses the first half. Weights that share intermediates go together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

ReverseGraph = Mapping[Node, set[Node]]  # for each node of an autograd graph, the nodes from which it gets gradients


@dataclass(eq=False)
class ParameterGroup:
    """Weights that share intermediates, and the gradients that reached these intermediates in the first half."""

    parameters: list[nn.Parameter]
    intermediates: set[Node]
    gradients: dict[Node, tuple[torch.Tensor | None, ...]] = field(default_factory=dict)


@dataclass
class SplitBackward:
    """State between the halves: the groups from which the second half starts, and weight gradients that are ready."""

    groups: list[ParameterGroup] = field(default_factory=list)
    ready: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)


def backward_input(
    outputs: Sequence[torch.Tensor],
    output_gradients: Sequence[torch.Tensor | None] | None,
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[nn.Parameter],
) -> SplitBackward:
    """Compute the gradients of the inputs into their ``.grad``.

    Args:
        outputs: outputs of the stage, or the loss of the last stage. They are not needed afterwards.
        parameters: parameters of the stage, some of which may be frozen.

    Returns:
        State for :func:`backward_weight`.
    """
    known = [torch.ones_like(value) for value in outputs] if output_gradients is None else output_gradients
    pairs = [
        (value, gradient)
        for value, gradient in zip(outputs, known, strict=True)
        if gradient is not None and value.requires_grad
    ]
    if not pairs:
        return SplitBackward()
    values, given = zip(*pairs, strict=True)
    wanted = [value for value in inputs if value.requires_grad]
    groups, early = _parameter_groups(values, wanted, parameters)
    with _capturing(groups):
        found = torch.autograd.grad(values, [*wanted, *early], given, retain_graph=bool(groups), allow_unused=True)
    for value, gradient in zip(wanted, found, strict=False):
        value.grad = gradient
    return SplitBackward(groups, _owned(early, found[len(wanted) :], [*given, *found[: len(wanted)]]))


def backward_weight(parameters: Sequence[nn.Parameter], split: SplitBackward) -> None:
    found = dict(split.ready)
    for group in split.groups:
        edges = [
            (GradientEdge(node, number), gradient)
            for node, gradients in group.gradients.items()
            for number, gradient in enumerate(gradients)
            if gradient is not None
        ]
        if not edges:
            continue
        starts, given = zip(*edges, strict=True)
        with _replaying(group):
            values = torch.autograd.grad(starts, group.parameters, given, allow_unused=True)
        found |= _owned(group.parameters, values, given)
    for parameter in parameters:
        if (value := found.get(parameter)) is not None:
            parameter.grad = value if parameter.grad is None else parameter.grad.add_(value)


def _parameter_groups(
    outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor], parameters: Iterable[nn.Parameter]
) -> tuple[list[ParameterGroup], list[nn.Parameter]]:
    """Return the weight groups of the second half, and the weights to compute in the first half."""
    roots = {get_gradient_edge(value).node for value in outputs}
    reverse = _reverse_graph(roots)
    input_path, _ = _reverse_closure({get_gradient_edge(value).node for value in inputs} & reverse.keys(), reverse)
    groups: list[ParameterGroup] = []
    bypassing: set[nn.Parameter] = set()
    for parameter in parameters:
        node = get_gradient_edge(parameter).node if parameter.requires_grad else None
        if node is None or node not in reverse:
            continue
        closure, intermediates = _reverse_closure({node}, reverse, input_path)
        if not roots.isdisjoint(closure):
            bypassing.add(parameter)
        group = ParameterGroup([parameter], intermediates)
        for other in [one for one in groups if not intermediates.isdisjoint(one.intermediates)]:
            groups.remove(other)
            group = ParameterGroup(other.parameters + group.parameters, other.intermediates | group.intermediates)
        groups.append(group)
    late = [
        group
        for group in groups
        if bypassing.isdisjoint(group.parameters) and not _are_nested(group.intermediates, reverse)
    ]
    return late, [parameter for group in groups if group not in late for parameter in group.parameters]


def _reverse_graph(roots: Iterable[Node]) -> ReverseGraph:
    reverse: dict[Node, set[Node]] = {root: set() for root in roots}
    waiting = [*reverse]
    while waiting:
        node = waiting.pop()
        for child, _ in node.next_functions:
            if child is None:
                continue
            if child not in reverse:
                reverse[child] = set()
                waiting.append(child)
            reverse[child].add(node)
    return reverse


def _reverse_closure(
    starts: Iterable[Node], reverse: ReverseGraph, barrier: Collection[Node] = ()
) -> tuple[set[Node], set[Node]]:
    """Return ``starts`` and the nodes that lead to them without crossing a barrier, and the barrier nodes reached."""
    closure = set(starts)
    met: set[Node] = set()
    waiting = [*closure]
    while waiting:
        for node in reverse[waiting.pop()]:
            if node in barrier:
                met.add(node)
            elif node not in closure:
                closure.add(node)
                waiting.append(node)
    return closure, met


def _are_nested(nodes: set[Node], reverse: ReverseGraph) -> bool:
    """Return whether one of the nodes leads to another."""
    if len(nodes) < 2:
        return False
    above, _ = _reverse_closure({parent for node in nodes for parent in reverse[node]}, reverse)
    return not nodes.isdisjoint(above)


@contextmanager
def _capturing(groups: Iterable[ParameterGroup]) -> Iterator[None]:
    def capture(group: ParameterGroup, node: Node, gradients: tuple[torch.Tensor | None, ...]) -> None:
        group.gradients[node] = gradients

    handles = [
        node.register_prehook(lambda gradients, group=group, node=node: capture(group, node, gradients))
        for group in groups
        for node in group.intermediates
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _replaying(group: ParameterGroup) -> Iterator[None]:
    """Pass the captured gradients to the intermediates, so that hooks do not change gradients a second time."""
    handles = [node.register_prehook(lambda _, kept=kept: kept) for node, kept in group.gradients.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _owned(
    parameters: Iterable[nn.Parameter], gradients: Iterable[torch.Tensor | None], others: Iterable[torch.Tensor | None]
) -> dict[nn.Parameter, torch.Tensor]:
    """Return gradients that may be added to, as after a whole backward pass: in own memory, with the weights' strides.

    Sparse gradients stay as they are.
    """
    taken = {_storage(value) for value in others if value is not None and not value.is_sparse}
    owned = {}
    for parameter, value in zip(parameters, gradients, strict=True):
        if value is None:
            continue
        if not value.is_sparse:
            if _storage(value) in taken or value.stride() != parameter.stride():
                value = torch.empty_like(parameter).copy_(value)
            taken.add(_storage(value))
        owned[parameter] = value.detach()
    return owned


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
