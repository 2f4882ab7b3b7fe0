"""The gradients of the single uses of a parameter.

Autograd sums up what comes from the uses of a parameter from the last one to the first. Of a parameter that a later
stage uses as well, the sum must begin there to have the same bits::

    uses             stage 0: 1, 2     stage 1: 3
    one process      (g3 + g2) + g1
    stage by stage   g3 + (g2 + g1)                 so stage 0 keeps g2 and g1 apart until g3 has come
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from paceline.errors import InputError

_CAST = "ToCopyBackward0"


class Uses:
    """Keeps the gradient of each use of a parameter, from the last use to the first.

    Args:
        name: of the parameter.
        parameter: the parameter.
        outputs: of the stage: what a backward pass will start from.
        autocast: whether its casts are shared.

    Raises:
        InputError: its uses cannot be told from those of other stages.
    """

    def __init__(self, name: str, parameter: nn.Parameter, outputs: Sequence[torch.Tensor], autocast: bool) -> None:
        self._kept: dict[tuple[int, int], torch.Tensor] = {}
        what = "is handed on to the next stage as a value" if any(value is parameter for value in outputs) else ""
        end = get_gradient_edge(parameter).node
        seen: set[Node] = {get_gradient_edge(value).node for value in outputs if value.requires_grad}
        waiting = [*seen]
        for number, node in enumerate(waiting):
            places = [place for place, (below, _) in enumerate(node.next_functions) if below == end]
            if places and autocast and node.name() == _CAST:
                what = "is cast by autocast, once for all its uses in one process but once in each stage here"
            if places:
                self._keep(node, number, places)
            new = {below for below, _ in node.next_functions if below is not None} - seen
            seen |= new
            waiting += new
        if what:
            raise InputError(
                f"exact=True: the parameter {name!r} {what}, and a later stage uses it as well, so its gradient would "
                f"not have the bits of one process. Cut so that one stage has all its uses (pipeline.cut), or leave "
                f"out exact=True."
            )

    def gradients(self) -> list[torch.Tensor]:
        """Those that a backward pass has left."""
        return [*self._kept.values()]

    def _keep(self, node: Node, number: int, places: list[int]) -> None:
        def keep(gradients: Sequence[torch.Tensor | None], _: object) -> None:
            for place in places:
                self._kept.pop((number, place), None)  # where both halves of a pass go through, the second one counts
                if (gradient := gradients[place]) is not None:
                    self._kept[number, place] = gradient

        node.register_hook(keep)
