"""Backward pass of one stage."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch


def backward(
    outputs: Sequence[torch.Tensor],
    output_gradients: Sequence[torch.Tensor | None] | None,  # gradients of the outputs. None for a loss.
    inputs: Sequence[torch.Tensor],
) -> None:
    """Compute the gradients of the inputs and of the weights into their ``.grad``."""
    gradients: Sequence[torch.Tensor | None] = [None] if output_gradients is None else output_gradients
    pairs = [
        (value, gradient)
        for value, gradient in zip(outputs, gradients, strict=True)
        if value.requires_grad and (gradient is not None or output_gradients is None)
    ]
    kept: dict[int, torch.Tensor] = {}
    for place, value in enumerate(inputs):
        if value.requires_grad:
            value.register_hook(partial(_keep_strides, kept, place, value.is_contiguous()))
    if pairs:
        torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])
    for place, gradient in kept.items():
        inputs[place].grad = gradient


def _keep_strides(kept: dict[int, torch.Tensor], place: int, is_contiguous: bool, gradient: torch.Tensor) -> None:
    """Keep a gradient with its own strides, because ``.grad`` takes the strides of the value."""
    if not (is_contiguous and gradient.is_contiguous()):
        kept[place] = gradient
