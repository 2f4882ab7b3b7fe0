"""What a spare worker does before it joins, and when it does: it gets its device then."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import torch

from paceline.checkpoint.training_state import TrainingState
from paceline.step.job import Job
from paceline.step.optimizers.exclusive import updating
from paceline.step.optimizers.own_values import OwnValues

_log = logging.getLogger("paceline")


def warm_up(job: Job, state: TrainingState) -> Callable[[], None]:
    """Take a step whose result is dropped, so that the others need not wait for what a process does only once.

    Returns:
        puts the optimizer's state back; to be called if nobody has a state to give.
    """
    compute, parameters, optimizer = job.compute, job.update.parameters, job.update.optimizer
    before = {name: value.detach().clone() for name, value in parameters.items()}
    optimizer_state = {key: copy.deepcopy(value) for key, value in optimizer.state.items()}
    own_values = OwnValues(optimizer, dict(compute.model.named_parameters()))
    kept = copy.deepcopy(own_values.state(0))
    compute.buffers.begin()
    try:
        (piece,) = job.feed.load(0, [range(1)])
        compute.forward_pass(piece, 0).total.backward()
        with updating:
            optimizer.step()
    except Exception as error:  # noqa: BLE001 - what the script's functions use may not exist before start() returns
        _log.info("the spare worker could not warm up: %s", error)
    compute.buffers.reset()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(before[name])
            parameter.grad = None
    torch.zeros(state.snapshot(0).bytes, dtype=torch.uint8)  # the allocator keeps it for the state to come

    def undo() -> None:
        optimizer.state.clear()
        optimizer.state.update(optimizer_state)
        own_values.load(kept)

    return undo


def move_to_device(job: Job) -> None:
    """Move what a spare has built on the CPU to the device that it has got; every tensor stays the same object."""
    device, model = job.world.device, job.compute.model
    for tensor in (*model.parameters(), *model.buffers()):
        put(tensor, tensor.data.to(device))
    for parameter, state in job.update.optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:  # others count, on the host
                state[key] = value.to(device)
    job.compute.buffers.move_to(device)
    job.feed.move_to(device)


def put(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Let a tensor have a value of another device."""
    tensor.data = value
