"""The two halves of a backward pass: first the gradients that another stage waits for, then those of the weights.

torch's pipelining has the algorithm, from Qi et al. 2024 (arXiv 2401.10241): the gradients at the places where the path
to the weights leaves the path to the inputs are kept, and the second half starts from there, so nothing is computed
twice.

Where the two cannot be told apart, as for a weight whose way to the loss meets no input, all is computed in the first
half, and the second one only hands it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

Group = dict[str, Any]
"""Weights ("params"), the places where their path leaves that to the inputs ("intermediates"), the gradients there."""


@dataclass
class Halves:
    """What the first half leaves for the second: where to start from, or the gradients of weights themselves."""

    groups: list[Group] = field(default_factory=list)
    ready: list[tuple[nn.Parameter, torch.Tensor]] = field(default_factory=list)


def backward_of_input(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None] | None,
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[nn.Parameter],
) -> Halves:
    """Put the gradients for the inputs into their ``.grad``.

    Args:
        outputs: of the stage; the loss of the last one. They are not needed any more.
        gradients: for them; none for a loss.
        inputs: of the stage.
        parameters: of the stage.

    Returns:
        what :func:`backward_of_weights` needs.
    """
    from torch.distributed.pipelining import _backward as torchs  # a second that others need not wait

    given = [torch.ones_like(value) for value in outputs] if gradients is None else gradients
    pairs = [(value, gradient) for value, gradient in zip(outputs, given, strict=True) if gradient is not None]
    pairs = [(value, gradient) for value, gradient in pairs if value.requires_grad]
    if not pairs:
        return Halves()
    wanted = [value for value in inputs if value.requires_grad]
    graph = torchs.construct_reverse_graph(_nodes(value for value, _ in pairs))
    reached = [parameter for parameter in parameters if _nodes([parameter])[0] in graph]
    groups = _apart(torchs.get_param_groups(_nodes(wanted), _nodes(reached), graph))
    if not wanted or sum(len(group["params"]) for group in groups) < len(reached):
        found = _gradients(pairs, [*wanted, *reached])
        _add(wanted, found)
        ready = zip(reached, found[len(wanted) :], strict=True)
        return Halves(ready=[(parameter, value) for parameter, value in ready if value is not None])
    handles = [
        node.register_prehook(_keeping(group, place))
        for group in groups
        for place, node in enumerate(group["intermediates"])
    ]
    try:
        _add(wanted, _gradients(pairs, wanted, retain_graph=True))
    finally:
        for handle in handles:
            handle.remove()
    return Halves(groups)


def backward_of_weights(parameters: Sequence[nn.Parameter], halves: Halves) -> None:
    """Add the gradients for the weights to their ``.grad``."""
    from torch.distributed.pipelining import _backward as torchs

    torchs.stage_backward_weight(iter(parameters), halves.groups)
    for parameter, value in halves.ready:
        parameter.grad = value if parameter.grad is None else parameter.grad.add_(value)


def _nodes(values: Iterable[torch.Tensor]) -> list[Node]:
    from torch.distributed.pipelining import _backward as torchs

    nodes = [torchs._get_grad_fn_or_grad_acc(value) for value in values]
    return [node for node in nodes if node is not None]


def _gradients(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], wanted: Sequence[torch.Tensor], retain_graph: bool = False
) -> tuple[torch.Tensor | None, ...]:
    values, given = zip(*pairs, strict=True)
    return torch.autograd.grad(values, wanted, given, retain_graph=retain_graph, allow_unused=True)


def _add(inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    for value, gradient in zip(inputs, gradients, strict=False):
        value.grad = gradient


def _keeping(group: Group, place: int) -> Any:
    """A hook that keeps the gradients that come to one of the places of a group."""
    group["grads"] = [()] * len(group["intermediates"])

    def keep(gradients: tuple[torch.Tensor | None, ...]) -> None:
        group["grads"][place] = gradients

    return keep


def _apart(groups: Sequence[Group]) -> list[Group]:
    """Groups without a common weight: torch finds two for one that meets the places of several others."""
    apart: list[Group] = []
    for group in groups:
        params, places = set(group["params"]), set(group["intermediates"])
        for other in [one for one in apart if params & one["params"] or places & one["intermediates"]]:
            apart.remove(other)
            params |= other["params"]
            places |= other["intermediates"]
        if places:
            apart.append({"params": params, "intermediates": places})
    for group in apart:
        group["intermediates"] = list(group["intermediates"])
    return apart
