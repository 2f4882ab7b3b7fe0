"""A trial pass through a model that leaves no trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Afterwards the buffers are the tensors that they were before, with the values that they had."""
    before = [
        (module, key, buffer, buffer.detach().clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module, key, buffer, value in before:
            buffer.data.copy_(value)
            module._buffers[key] = buffer
