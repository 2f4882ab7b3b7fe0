"""Probe whether an optimizer gives a slice of a parameter the bits that it gives the same elements of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.data.keys import preserve_generators, seed_torch
from paceline.schedule.slices import BLOCK
from paceline.step.optimizers.several import parts_of
from paceline.step.probes.optimizer_probe import PROBE_SCALES, copy_small, set_initial_state, step_hooks, step_of

_SIZES = (2 * BLOCK, BLOCK), (4096 + BLOCK, 4096, 4096 - BLOCK)
"""Sizes of the slices. Optimizers with quantized states quantize from 4,096 elements on, in blocks of 256 or more.
Those with a matrix for each dimension, such as Shampoo, fail with the small slices: one of 12,288 takes them hours."""


def updates_slices_alike(optimizer: Optimizer) -> bool:
    """Return whether slices of whole blocks get the same update as the whole parameter, bit by bit.

    A copy of the optimizer takes some steps on parameters of 192 and of 12,288 elements, and on slices of each. Also
    returns False if the optimizer cannot be tried, or has step hooks, which may look at the model's parameters.
    """
    return all(map(_alike, parts_of(optimizer)))


def _alike(optimizer: Optimizer) -> bool:
    if step_hooks(optimizer):
        return False
    with preserve_generators():
        try:
            return all(
                all(map(torch.equal, _updated(optimizer, sizes, sliced=False), _updated(optimizer, sizes, sliced=True)))
                for sizes in _SIZES
            )
        except Exception:  # noqa: BLE001 - an optimizer may reject small parameters or slices in any way
            return False


def _updated(optimizer: Optimizer, sizes: tuple[int, ...], *, sliced: bool) -> Iterator[torch.Tensor]:
    """Yield each small parameter, flattened, after the steps."""
    small, parameters = copy_small(optimizer, partial(_example, sum(sizes)), state=False)
    kinds: dict[object, nn.Parameter] = {}  # one parameter of each kind is enough
    for number, group in enumerate(small.param_groups):
        for value in group["params"]:
            kinds.setdefault((number, value.dtype, value.device, value.ndim), value)
    parameters = [*kinds.values()]
    values = [_slices(value, sizes) if sliced else [value] for value in parameters]
    of = dict(zip(parameters, values, strict=True))
    for group in small.param_groups:
        group["params"] = [part for value in group["params"] for part in of.get(value, ())]
    set_initial_state(small, optimizer)
    step: Callable[[Optimizer], object] = step_of(small)
    for number, scale in enumerate(PROBE_SCALES):
        for place, (value, parts) in enumerate(zip(parameters, values, strict=True)):
            seed_torch(number * len(parameters) + place)
            gradient = scale * torch.randn_like(value)
            for part, grad in zip(parts, _slices(gradient, sizes) if sliced else [gradient], strict=True):
                part.grad = grad.detach()
        step(small)
    for value in parameters:
        yield value.detach().reshape(-1)


def _slices(value: torch.Tensor, sizes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(part) for part in value.detach().view(-1).split(sizes)]


def _example(size: int, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of ``size`` elements with as many dimensions as a parameter."""
    shape = [size] if value.ndim <= 1 else [1] * (value.ndim - 2) + [96, size // 96]
    return value.detach().new_empty(shape)
