"""Trial passes through a model that leave no trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from paceline.data.keys import preserve_generators


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers, both tensors and values, and the random generators on exit."""
    before = [
        (module, key, buffer, buffer.detach().clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        with preserve_generators():
            yield
    finally:
        for module, key, buffer, value in before:
            buffer.data.copy_(value)
            module._buffers[key] = buffer
