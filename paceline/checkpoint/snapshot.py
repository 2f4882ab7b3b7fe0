"""The state at one step, as it goes into a checkpoint, and the host buffers it waits in to be written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.tensors import fingerprint, hash_of


@dataclass(frozen=True)
class Snapshot:
    """The content of one checkpoint.

    Attributes:
        step: steps done.
        tensors: the tensors by name.
        extra: the rest of the state, pickled.
        order, numerics, versions: as in the manifest.
        time: when it was taken, in seconds since 1970.
    """

    step: int
    tensors: Mapping[str, torch.Tensor]
    extra: torch.Tensor
    order: dict[str, int]
    numerics: dict[str, object]
    versions: dict[str, str]
    time: float = field(default_factory=time.time)

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.tensors.values(), self.extra))

    def manifest(self) -> Manifest:
        """Describe the snapshot; hashing takes about a second per gigabyte."""
        kinds: dict[str, list[Any]] = {
            name: [str(value.dtype), list(value.shape)] for name, value in self.tensors.items()
        }
        return Manifest(
            step=self.step,
            order=self.order,
            tensors=kinds,
            fingerprint=fingerprint(self.tensors),
            extra=hash_of(self.extra).hex(),
            numerics=self.numerics,
            versions=self.versions,
            time=self.time,
        )


class HostBuffers:
    """Host memory for one state, reused by each save."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Copy a snapshot, so that training may change the original. The copy is valid until the next call.

        Copies from a GPU go to pinned memory, all at once, with one wait at the end.
        """
        copies: dict[str, torch.Tensor] = {}
        devices = set()
        for name, value in snapshot.tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                buffer = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            buffer.copy_(value, non_blocking=value.is_cuda)
            if value.is_cuda:
                devices.add(value.device)
            copies[name] = buffer
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        self._buffers = copies
        return replace(snapshot, tensors=copies)
