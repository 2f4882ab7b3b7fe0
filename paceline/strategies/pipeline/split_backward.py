"""The two halves of a backward pass: first the gradients that another stage waits for, then those of the weights.

After torch's pipelining and Qi et al. 2024 (arXiv 2401.10241): the gradients at the places where the path to the
weights leaves the path to the inputs are kept, and the second half starts from there, so nothing is computed twice.

::

    output -- P -- P -- P -- input        P   a node on the path to the inputs: the first half
              |         |                 W   one that leads to weights only: the second half
              W         W

Where the two cannot be told apart, the weights are computed in the first half, and the second one only hands them out:
those whose way to the loss meets no input, and those with places of which one lies below the other, as the way from
the upper one to the weight goes through the first half. Weights that have a place in common are computed together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Kept = tuple[torch.Tensor | None, ...]
"""The gradients that come to a place."""


@dataclass(eq=False)
class Group:
    """Weights, the places where their path leaves that to the inputs, and the gradients that came there."""

    parameters: list[nn.Parameter]
    places: set[Node]
    kept: dict[Node, Kept] = field(default_factory=dict)


@dataclass
class SplitBackward:
    """What the first half leaves for the second: where to start from, or the gradients of weights themselves."""

    groups: list[Group] = field(default_factory=list)
    ready: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)


def backward_of_input(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None] | None,
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[nn.Parameter],
) -> SplitBackward:
    """Put the gradients for the inputs into their ``.grad``.

    Args:
        outputs: of the stage; the loss of the last one. They are not needed any more.
        gradients: for them; none for a loss.
        inputs: of the stage.
        parameters: of the stage; some may be frozen.

    Returns:
        what :func:`backward_of_weights` needs.
    """
    given = [torch.ones_like(value) for value in outputs] if gradients is None else gradients
    pairs = [
        (value, gradient)
        for value, gradient in zip(outputs, given, strict=True)
        if gradient is not None and value.requires_grad
    ]
    if not pairs:
        return SplitBackward()
    values, known = zip(*pairs, strict=True)
    wanted = [value for value in inputs if value.requires_grad]
    groups, early = _told_apart(values, wanted, parameters)
    with _keeping(groups):
        found = torch.autograd.grad(values, [*wanted, *early], known, retain_graph=bool(groups), allow_unused=True)
    for value, gradient in zip(wanted, found, strict=False):
        value.grad = gradient
    return SplitBackward(groups, _own(early, found[len(wanted) :], [*known, *found[: len(wanted)]]))


def backward_of_weights(parameters: Sequence[nn.Parameter], halves: SplitBackward) -> None:
    """Add the gradients for the weights to their ``.grad``."""
    found = dict(halves.ready)
    for group in halves.groups:
        edges = [
            (GradientEdge(place, number), gradient)
            for place, kept in group.kept.items()
            for number, gradient in enumerate(kept)
            if gradient is not None
        ]
        if not edges:
            continue
        starts, known = zip(*edges, strict=True)
        with _giving(group):
            values = torch.autograd.grad(starts, group.parameters, known, allow_unused=True)
        found |= _own(group.parameters, values, known)
    for parameter in parameters:
        if (value := found.get(parameter)) is not None:
            parameter.grad = value if parameter.grad is None else parameter.grad.add_(value)


def _told_apart(
    outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor], parameters: Iterable[nn.Parameter]
) -> tuple[list[Group], list[nn.Parameter]]:
    """The weights of the second half, and those that are computed in the first."""
    roots = {get_gradient_edge(value).node for value in outputs}
    above = _above(roots)
    path, _ = _climb({get_gradient_edge(value).node for value in inputs} & above.keys(), above)
    groups: list[Group] = []
    at_end: set[nn.Parameter] = set()
    for parameter in parameters:
        node = get_gradient_edge(parameter).node if parameter.requires_grad else None
        if node is None or node not in above:
            continue
        alone, places = _climb({node}, above, path)
        if not roots.isdisjoint(alone):
            at_end.add(parameter)
        group = Group([parameter], places)
        for other in [one for one in groups if not places.isdisjoint(one.places)]:
            groups.remove(other)
            group = Group(other.parameters + group.parameters, other.places | group.places)
        groups.append(group)
    late = [group for group in groups if at_end.isdisjoint(group.parameters) and not _entangled(group.places, above)]
    return late, [parameter for group in groups if group not in late for parameter in group.parameters]


def _above(roots: Iterable[Node]) -> dict[Node, set[Node]]:
    """For each node of a graph those from which its gradient comes."""
    above: dict[Node, set[Node]] = {root: set() for root in roots}
    waiting = [*above]
    while waiting:
        node = waiting.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            if below not in above:
                above[below] = set()
                waiting.append(below)
            above[below].add(node)
    return above


def _climb(
    starts: Iterable[Node], above: Mapping[Node, set[Node]], path: Collection[Node] = ()
) -> tuple[set[Node], set[Node]]:
    """The nodes from which some can be reached, these included, up to a path; and where it is met."""
    seen = set(starts)
    met: set[Node] = set()
    waiting = [*seen]
    while waiting:
        for node in above[waiting.pop()]:
            if node in path:
                met.add(node)
            elif node not in seen:
                seen.add(node)
                waiting.append(node)
    return seen, met


def _entangled(places: set[Node], above: Mapping[Node, set[Node]]) -> bool:
    """Whether one of some places lies below another."""
    if len(places) < 2:
        return False
    higher, _ = _climb({node for place in places for node in above[place]}, above)
    return not places.isdisjoint(higher)


@contextmanager
def _keeping(groups: Iterable[Group]) -> Iterator[None]:
    """In which the gradients that come to the places of groups are kept."""

    def keep(group: Group, place: Node, gradients: Kept) -> None:
        group.kept[place] = gradients

    handles = [
        place.register_prehook(lambda gradients, group=group, place=place: keep(group, place, gradients))
        for group in groups
        for place in group.places
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _giving(group: Group) -> Iterator[None]:
    """In which the places of a group get what was kept: a hook on a value in between has already changed it."""
    handles = [place.register_prehook(lambda _, kept=kept: kept) for place, kept in group.kept.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _own(
    parameters: Iterable[nn.Parameter],
    gradients: Iterable[torch.Tensor | None],
    others: Iterable[torch.Tensor | None],
) -> dict[nn.Parameter, torch.Tensor]:
    """Gradients that may be added to, as a whole pass leaves them: in no memory of others, laid out as the weights.

    Sparse ones stay as they are.
    """
    taken = {_storage(value) for value in others if value is not None and not value.is_sparse}
    own = {}
    for parameter, value in zip(parameters, gradients, strict=True):
        if value is None:
            continue
        if not value.is_sparse:
            if _storage(value) in taken or value.stride() != parameter.stride():
                value = torch.empty_like(parameter).copy_(value)
            taken.add(_storage(value))
        own[parameter] = value.detach()
    return own


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
