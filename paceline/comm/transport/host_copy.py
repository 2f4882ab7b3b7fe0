"""A copy of a tensor to the memory of the host, while other things go on."""

from __future__ import annotations

import torch


class HostCopy:
    """A copy to the host, under way since this object was made.

    From a GPU it goes through pinned memory, and only :meth:`wait` holds up the host: until the GPU has come that far,
    not until it has done all that was queued since.

    Args:
        value: of any shape and type.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self._ready: torch.cuda.Event | None = None
        if value.is_cuda:
            self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._host.copy_(value, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(value.device))
        else:
            self._host = value.to("cpu", copy=True)

    def wait(self) -> torch.Tensor:
        """The tensor in the memory of the host."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._host
