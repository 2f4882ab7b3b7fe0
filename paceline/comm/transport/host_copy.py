"""Asynchronous copy of a tensor to host memory."""

from __future__ import annotations

import torch


class HostCopy:
    """Copy to the host that starts when this object is created.

    A copy from a GPU uses pinned memory, and only :meth:`wait` blocks the host. It waits until the GPU has finished the
    copy, not until the GPU has finished the work that was queued afterwards.
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
        if self._ready is not None:
            self._ready.synchronize()
        return self._host
