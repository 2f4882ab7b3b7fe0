"""Spare workers: warm-up before joining, and the move to the device that they get when they join."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import torch

from paceline.checkpoint.training_state import TrainingState
from paceline.step.context import TrainingContext
from paceline.step.optimizers.exclusive import updating
from paceline.step.optimizers.own_values import OwnValues
from paceline.strategies import registry
from paceline.strategies.sharded.shards import slices_alike

_log = logging.getLogger("paceline")


def warm_up(context: TrainingContext, state: TrainingState) -> Callable[[], None]:
    """Take a step and discard its result, so that other workers do not wait for one-time costs of this process.

    If this worker will have a share of the state only, the optimizer updates the smallest parameter alone.

    Returns:
        a function that restores the optimizer's state, to be called if no worker has a state to send.
    """
    compute, parameters, optimizer = context.compute, context.update.parameters, context.update.optimizer
    divided = registry.divides_state(context)
    updated = [min(parameters, key=lambda name: parameters[name].numel())] if divided else [*parameters]
    before = {name: parameters[name].detach().clone() for name in updated}
    optimizer_state = {key: copy.deepcopy(value) for key, value in optimizer.state.items()}
    own_values = OwnValues(optimizer, dict(compute.model.named_parameters()))
    kept = copy.deepcopy(own_values.state(0))
    compute.buffers.begin()
    try:
        (group,) = context.feed.load(*context.order.example(0))
        compute.forward_pass(group, 0).total.backward()
        for name in parameters.keys() - before.keys():
            parameters[name].grad = None
        with updating:
            optimizer.step()
    except Exception as error:  # noqa: BLE001 - the script's functions may use names defined after start() returns
        _log.info("the spare worker could not warm up: %s", error)
    compute.buffers.reset()
    if divided:
        slices_alike(context)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name in before:
                parameter.copy_(before[name])
            parameter.grad = None
    if not divided:
        torch.zeros(state.snapshot(0).bytes, dtype=torch.uint8)  # the allocator keeps this memory for received state

    def undo() -> None:
        optimizer.state.clear()
        optimizer.state.update(optimizer_state)
        own_values.load(kept)

    return undo


def move_to_device(context: TrainingContext) -> None:
    """Move the model, optimizer state and feed from the CPU to this worker's device. Tensors keep their identity."""
    device, model = context.world.device, context.compute.model
    context.probe_results.slices_alike = None  # the optimizer was probed on the CPU
    for tensor in (*model.parameters(), *model.buffers()):
        put(tensor, tensor.data.to(device))
    for parameter, state in context.update.optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:  # step counters stay on the host
                state[key] = value.to(device)
    context.compute.buffers.move_to(device)
    context.feed.move_to(device)


def put(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the data of a tensor with a value that may be on another device."""
    tensor.data = value
