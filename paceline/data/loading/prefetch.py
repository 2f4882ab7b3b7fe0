"""Prefetch of batches to the device during the step before.

::

    host           load 1 ┐        load 2 ┐
    side stream           └ copy 1        └ copy 2
    main stream    step 0 ─────────step 1 ─────────step 2
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.data.nested import map_leaves, tensors_in


class Upload:
    """Asynchronous copy of data to a device, started by the constructor.

    Tensors that are already on the device are not copied. Copies to a GPU go from pinned memory.

    Args:
        data: nested data; see :mod:`paceline.data.nested`.
        stream: CUDA stream on which the copy is queued. Defaults to the current stream.
    """

    def __init__(self, data: Any, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._copied: torch.cuda.Event | None = None
        if stream is None:
            self._data = data if device.type == "cpu" else to_device(data, device)
            return
        with torch.cuda.stream(stream):
            self._data = to_device(data, device)
            self._copied = stream.record_event()

    def wait(self) -> Any:
        """Return the data on the device. The current stream waits for the copy; the host does not."""
        if self._copied is not None:
            current = torch.cuda.current_stream()
            current.wait_event(self._copied)
            for one in tensors_in(self._data):
                if one.is_cuda:
                    one.record_stream(current)  # no other copy reuses its memory before the step is done
        return self._data


def upload_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a new stream for copies to a GPU, or None for another device."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def to_device(data: Any, device: torch.device) -> Any:
    """Move a batch to a device without waiting for the copies: its tensors and other objects that have ``to``."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _moved(leaf, device)
        return leaf.to(device) if callable(getattr(leaf, "to", None)) and not isinstance(leaf, type) else leaf

    return map_leaves(moved, data)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_sparse and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def rows_of(tensor: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return rows of a tensor, on its device, by numbers on the host."""
    return tensor[numbers if tensor.device.type == "cpu" else to_device(numbers, tensor.device)]
