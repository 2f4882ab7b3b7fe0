"""Where checkpoints are kept: an interface, with a folder (folder.py) or an object store (object_store.py) behind it.

A checkpoint is complete when its manifest is there, and the manifest is written last. A kill at any moment leaves the
complete ones as they were, and at most files without a manifest, which the next save removes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from paceline.checkpoint.manifest import LARGEST

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

    def open(self, name: str, file: str) -> AbstractContextManager[BinaryIO]:
        """Open a file of a checkpoint for reading.

        Raises:
            OSError: there is none, or it is no regular file.
        """

    def begin(self, name: str, size: int) -> None:
        """Remove what interrupted saves left, and begin a checkpoint of ``size`` bytes.

        Raises:
            OSError: there is no room for it.
        """

    def create(self, name: str, file: str) -> AbstractContextManager[BinaryIO]:
        """Create a file of the checkpoint that was begun; closing it makes it durable, as far as the store can."""

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


def read_manifest(file: BinaryIO) -> str:
    """Read the text of a manifest, which has a limited size.

    Raises:
        OSError: it cannot be read, or is too long.
        UnicodeDecodeError: it is no text.
    """
    text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise OSError(f"it has more than {LARGEST:,} bytes")
    return text.decode()
