"""Where checkpoints are kept: an interface, with a folder (folder.py) or an object store (object_store.py) behind it.

A checkpoint is complete when its manifest is there, and the manifest is written last. A kill at any moment leaves the
complete ones as they were, and at most files without a manifest, which the next save removes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

LATEST = "latest"
_DAMAGED = "damaged-"


class Storage(Protocol):
    """The checkpoints of one run. Only one process at a time may write."""

    def location(self, name: str = "") -> Path | str:
        """The path or URL of a checkpoint, or of the whole storage."""

    def complete(self) -> list[str]:
        """The names of the complete checkpoints, the newest first."""

    def manifest(self, name: str) -> str:
        """The text of a manifest.

        Raises:
            OSError: there is none.
        """

    def reader(self, name: str) -> StorageReader:
        """A reader for the tensors of a checkpoint."""

    def begin(self, name: str, size: int) -> StorageWriter:
        """Remove what interrupted saves left, and begin a checkpoint of ``size`` bytes.

        Raises:
            OSError: there is no room for it.
        """

    def commit(self, name: str, manifest: str) -> None:
        """Complete the checkpoint that was begun."""

    def abandon(self, name: str) -> None:
        """Remove the checkpoint that was begun."""

    def remove(self, name: str) -> None:
        """Remove a complete checkpoint; a kill on the way leaves no damaged one."""

    def set_aside(self, name: str) -> Path | str:
        """Rename a damaged checkpoint to something that is not taken for one; return its new location."""


def free_name(name: str, taken: set[str]) -> str:
    """``damaged-step-000006``, or with a number behind it if that is taken."""
    wanted = f"{_DAMAGED}{name}"
    number = 2
    while wanted in taken:
        wanted = f"{_DAMAGED}{name}-{number}"
        number += 1
    return wanted
