"""Exact tied weights: the gradient of each use of a parameter.

Autograd adds up the gradients of a parameter's uses from the last use to the first. If a later stage uses the parameter
as well, the sum must begin in that stage to have the same bits::

    uses             stage 0: 1, 2     stage 1: 3
    one process      (g3 + g2) + g1
    stage by stage   g3 + (g2 + g1)                 so stage 0 keeps g2 and g1 separate until g3 arrives

Code that changes the sum before it reaches ``.grad``, or adds to it in another way, is refused, because in one process
it would see the gradients of all stages.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from paceline.errors import InputError
from paceline.system.torch_internals import gradient_hooks

_CAST = "ToCopyBackward0"


class TiedUses:
    """Recorder of the gradient of each use of a parameter in one stage, from the last use to the first.

    Args:
        outputs: outputs of the stage, from which the backward pass will start.
    """

    def __init__(self, name: str, stage: int, parameter: nn.Parameter, outputs: Sequence[torch.Tensor]) -> None:
        self._name, self._stage, self._parameter = name, stage, parameter
        self._gradients: dict[tuple[int, int], torch.Tensor] = {}
        self._is_cast = False
        self._is_output = any(value is parameter for value in outputs)
        end = get_gradient_edge(parameter).node
        seen: set[Node] = {get_gradient_edge(value).node for value in outputs if value.requires_grad}
        waiting = [*seen]
        for number, node in enumerate(waiting):
            places = [place for place, (below, _) in enumerate(node.next_functions) if below == end]
            if places:
                self._is_cast |= node.name() == _CAST
                self._record(node, number, places)
            new = {below for below, _ in node.next_functions if below is not None} - seen
            seen |= new
            waiting += new

    def check_separable(self, autocast: bool) -> None:
        """Raise if the gradient of the parameter depends on all its uses together.

        Args:
            autocast: whether uses share a cast of the parameter.
        """
        parameter = self._parameter
        if gradient_hooks(parameter):
            what = "has a hook, which would get the gradient of each stage separately"
        elif self._is_output:
            what = "is an output of the stage"
        elif autocast and self._is_cast:
            what = "is cast by autocast, once for all its uses in one process but once in each stage here"
        else:
            return
        raise InputError(
            f"exact=True: the parameter {self._name!r} {what}, and a later stage uses it as well, so its gradient "
            f"would not have the bits of one process. Cut so that one stage has all its uses (pipeline.cut), or leave "
            f"out exact=True."
        )

    def check_complete(self, gradient: torch.Tensor | None) -> None:
        """Raise InputError if a gradient is not the sum over the recorded uses."""
        found = self.gradients()
        if self._is_output or _equal(functools.reduce(torch.add, found) if found else None, gradient):
            return
        raise InputError(
            f"exact=True: the parameter {self._name!r} got a gradient in stage {self._stage} that is not the sum of "
            f"those of its uses there, as in reentrant checkpointing; other stages use it as well, so its gradient "
            f"would not have the bits of one process. Use checkpoint(..., use_reentrant=False), cut so that one stage "
            f"has all its uses (pipeline.cut), or leave out exact=True."
        )

    def gradients(self) -> list[torch.Tensor]:
        return [*self._gradients.values()]

    def _record(self, node: Node, number: int, places: list[int]) -> None:
        def record(gradients: Sequence[torch.Tensor | None], _: object) -> None:
            for place in places:
                self._gradients.pop((number, place), None)  # the second half of a split backward pass counts
                if (gradient := gradients[place]) is not None:
                    self._gradients[number, place] = gradient

        node.register_hook(record)


def _equal(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """Return whether two values are equal, where NaN equals NaN."""
    if left is None or right is None:
        return left is right
    return torch.allclose(left, right, rtol=0.0, atol=0.0, equal_nan=True)
