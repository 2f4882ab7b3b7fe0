"""Trial passes through a model without side effects on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from paceline.data.keys import preserve_generators
from paceline.system.torch_internals import own_buffers


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers, as objects and values, plain attributes and the random generators on exit."""
    before = [
        (module, key, buffer, buffer.detach().clone())
        for module in model.modules()
        for key, buffer in own_buffers(module).items()
        if buffer is not None
    ]
    plain = [(module, plain_attributes(module)) for module in model.modules()]
    try:
        with preserve_generators():
            yield
    finally:
        for module, attributes in plain:
            vars(module).update(attributes)
        for module, key, buffer, value in before:
            buffer.data.copy_(value)
            own_buffers(module)[key] = buffer


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the numbers and strings that a module keeps, such as a count of its calls."""
    return {key: value for key, value in vars(module).items() if isinstance(value, int | float | str)}


@contextmanager
def kept_gradients(model: nn.Module) -> Iterator[None]:
    """Set the gradients aside, and restore them on exit."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
