"""The state at one step, as it goes into a checkpoint; and the host memory where it waits to be written."""

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
    """What one checkpoint is made of.

    Attributes:
        step: steps done.
        tensors: the tensors by name.
        extra: what is no tensor, as bytes.
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
        """The size of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.tensors.values(), self.extra))

    def manifest(self) -> Manifest:
        """The description; computes the hashes, about a second for a gigabyte."""
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
    """Host memory for one state; the same memory is used for each save."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """The same snapshot in this memory, so that training may change the original; valid until the next call.

        From a GPU, all copies go to pinned memory at once, and are waited for together.
        """
        staged: dict[str, torch.Tensor] = {}
        devices = set()
        for name, value in snapshot.tensors.items():
            place = self._kept.get(name)
            if place is None or place.shape != value.shape or place.dtype != value.dtype:
                place = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            place.copy_(value, non_blocking=value.is_cuda)
            if value.is_cuda:
                devices.add(value.device)
            staged[name] = place
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        self._kept = staged
        return replace(snapshot, tensors=staged)
