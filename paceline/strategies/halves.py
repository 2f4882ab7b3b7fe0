"""The two halves of a backward pass: first the gradients that another stage waits for, then those of the weights.

torch's pipelining has the algorithm, from Qi et al. 2024 (arXiv 2401.10241): the gradients at the places where the path
to the weights leaves the path to the inputs are kept, and the second half starts from there, so nothing is computed
twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def backward_of_input(
    outputs: list[torch.Tensor],
    gradients: list[torch.Tensor | None] | None,
    inputs: list[torch.Tensor],
    parameters: Sequence[nn.Parameter],
) -> Any:
    """Put the gradients for the inputs into their ``.grad``.

    Args:
        outputs: of the stage; the loss of the last one.
        gradients: for them; none for a loss.
        inputs: of the stage.
        parameters: of the stage.

    Returns:
        what :func:`backward_of_weights` needs.
    """
    from torch.distributed.pipelining._backward import stage_backward_input  # a second that others need not wait

    wanted = [value.requires_grad for value in outputs]
    kept = [value for value, wants in zip(outputs, wanted, strict=True) if wants]
    given: list[torch.Tensor] | None = None
    if gradients is not None:
        given = [
            torch.zeros_like(value) if gradient is None else gradient
            for value, gradient in zip(outputs, gradients, strict=True)
            if value.requires_grad
        ]
    _, groups = stage_backward_input(kept, given, inputs, iter(parameters))
    return groups


def backward_of_weights(parameters: Sequence[nn.Parameter], halves: Any) -> None:
    """Put the gradients for the weights into their ``.grad``."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(parameters), halves)
