"""Probe for a loss that reads values kept by the model's layers, which another worker computes in a pipeline."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from paceline.data.feed import MicrobatchGroup
from paceline.data.keys import STEP, seed_all
from paceline.data.nested import map_tensors
from paceline.data.objects.attributes import Attributes, same
from paceline.errors import InputError
from paceline.step.context import TrainingContext
from paceline.step.probes.probe import without_trace

_log = logging.getLogger("paceline")


def check_kept(context: TrainingContext, group: MicrobatchGroup, step: int) -> list[str]:
    """Compute the loss of a microbatch, and once more from the output alone. Leaves no trace.

    Returns:
        the names of the values besides buffers that the forward pass of the model keeps and that depend on the samples.
        The loss does not read them in this step.

    Raises:
        InputError: the losses differ. Names the values that the forward pass of the model keeps.
    """
    try:
        with without_trace(context):
            moved, text = _probe(context, group, step)
    except Exception as error:  # noqa: BLE001 - the step itself will raise it
        _log.debug("the loss could not be computed twice: %s", error)
        return []
    if text:
        raise InputError(text)
    return moved


def _probe(context: TrainingContext, group: MicrobatchGroup, step: int) -> tuple[list[str], str]:
    compute = context.compute
    outputs: list[Any] = []

    def model(values: Any) -> Any:
        outputs.append(compute.model(values))
        return outputs[-1]

    def loss_from(call: Callable[[Any], Any]) -> torch.Tensor:
        seed_all(compute.seed(STEP, step, group.microbatches.start))
        data = copy.deepcopy(group.data)  # which the forward pass may change
        return compute.loss_of(replace(group, data=data), step, call)[1].detach()

    loss_from(model)
    before = kept_attributes(context)
    buffers = compute.buffers.grown()
    output = map_tensors(torch.detach, outputs[0])
    first, repeated = (loss_from(lambda _: output) for _ in range(2))
    if not same(first, repeated):
        return [], ""  # the loss draws its own random numbers
    compute.buffers.put_back()
    with compute.precision():  # make the layers keep values of other samples
        compute.model(map_tensors(other_values, copy.deepcopy(compute.input_of(group, step))))
    after = kept_attributes(context)
    try:
        again: torch.Tensor | None = loss_from(lambda _: output)
    except Exception as error:  # noqa: BLE001 - for example, an attribute that a layer has not set yet
        _log.debug("the loss needs more than the output: %s", error)
        again = None
    moved = [name for name, value in after.values.items() if not same(before.values.get(name), value)]
    if again is not None and same(first, again):
        return moved, ""
    now = compute.buffers.grown()
    names = [f"the buffer {name!r}" for name, value in buffers.items() if not same(value, now.get(name))]
    for name in moved:
        held = after.tensors.get(name)
        if held is not None and same(
            first, _loss_with(held, before.values.get(name), lambda: loss_from(lambda _: output))
        ):
            return moved, kept_text(context, name)
    names += moved
    return moved, kept_text(context, names[0] if names else "something")


def kept_attributes(context: TrainingContext) -> Attributes:
    """Return the values besides parameters and buffers that the model holds, under the names of :func:`check_kept`."""
    model = context.compute.model
    return Attributes({"model": model}, {id(value) for value in [*model.parameters(), *model.buffers()]})


def kept_text(context: TrainingContext, what: str) -> str:
    """Return the message about a value that the model keeps and the loss reads."""
    return (
        f"The loss reads {what}, which the forward pass of the model keeps. With strategy "
        f"{context.settings.strategy!r} other workers compute the layers, so the loss would read an old value, without "
        f"a gradient. Let the model return it beside its output, or use strategy 'allreduce'."
    )


def _loss_with(held: torch.Tensor, value: Any, loss: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """Return the loss with a tensor set to its earlier value, or None if that value does not fit."""
    if not isinstance(value, torch.Tensor) or value.shape != held.shape:
        return None
    held.data.copy_(value)
    return loss()


def other_values(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same kind with different values."""
    if value.dtype is torch.bool:
        return value.logical_not()
    return value + 1 if value.is_floating_point() or value.dim() == 0 else value.roll(1, dims=-1)
