"""Where checkpoints are kept: one small interface, a local folder behind it, or a URL (see remote.py).

A checkpoint is complete when its manifest is there, and that is written last. A kill at any moment leaves the complete
ones as they were, and at most remains without a manifest, which the next save removes.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Protocol

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from paceline.checkpoint.manifest import FILE, newest_first, step_of

LATEST = "latest"
_PARTIAL = ".partial-"
_DAMAGED = "damaged-"


class Folder(Protocol):
    """The folder of a run's checkpoints. Only one process at a time may write to it."""

    def place(self, name: str = "") -> Path | str:
        """Where a checkpoint is, or the folder itself: a path, or a URL."""

    def complete(self) -> list[str]:
        """The names of the complete checkpoints, the newest first."""

    def manifest(self, name: str) -> str:
        """The text of a manifest.

        Raises:
            OSError: there is none.
        """

    def reader(self, name: str) -> StorageReader:
        """Reads the tensors of a checkpoint."""

    def begin(self, name: str, size: int) -> StorageWriter:
        """Remove what interrupted saves left, and begin a checkpoint of so many bytes.

        Raises:
            OSError: there is no room for it.
        """

    def commit(self, name: str, manifest: str) -> None:
        """Make complete what was begun."""

    def abandon(self, name: str) -> None:
        """Remove what was begun."""

    def remove(self, name: str) -> None:
        """Remove a complete checkpoint; a kill on the way leaves no damaged one."""

    def set_aside(self, name: str) -> Path | str:
        """Give a damaged checkpoint another name, under which nobody looks for one; returns where it is now."""


def folder_at(place: Path | str) -> Folder:
    """The folder at a path or a URL.

    Raises:
        ConfigError: what the URL needs is not installed.
    """
    if is_url(place):
        from paceline.checkpoint.remote import RemoteFolder

        return RemoteFolder(str(place))
    return LocalFolder(Path(place))


def is_url(place: Path | str) -> bool:
    """Whether this is a URL such as ``s3://bucket/run``, and no path."""
    return isinstance(place, str) and re.match(r"\w[\w+.-]*://", place) is not None


def split(place: Path | str) -> tuple[Path | str, str]:
    """The folder that a path or URL is in, and its name there."""
    if is_url(place):
        above, _, name = str(place).rstrip("/").rpartition("/")
        return above, name
    path = Path(place).absolute()
    return path.parent, path.name


def same(one: Path | str, other: Path | str) -> bool:
    """Whether two folders are the same."""
    if is_url(one) or is_url(other):
        return str(one).rstrip("/") == str(other).rstrip("/")
    return Path(one).resolve() == Path(other).resolve()


def free_name(name: str, taken: set[str]) -> str:
    """``damaged-step-000006``, or with a number behind it if that is taken."""
    wanted = f"{_DAMAGED}{name}"
    number = 2
    while wanted in taken:
        wanted = f"{_DAMAGED}{name}-{number}"
        number += 1
    return wanted


class LocalFolder:
    """A folder in a file system of this machine. A checkpoint gets its name by one rename, when it is complete.

    A worker that was stopped and dropped may wake up in the middle of a save, and take another one for steps that are
    long done: so each writer has names of its own for what is not complete, and leaves those of later steps alone.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = os.urandom(4).hex()

    def place(self, name: str = "") -> Path:
        return self._path / name

    def complete(self) -> list[str]:
        return newest_first(file.parent.name for file in self._path.glob(f"step-*/{FILE}"))

    def manifest(self, name: str) -> str:
        return (self._path / name / FILE).read_text()

    def reader(self, name: str) -> StorageReader:
        return FileSystemReader(self._path / name)

    def begin(self, name: str, size: int) -> StorageWriter:
        partial = self._partial(name)
        for left in self._path.glob(f"{_PARTIAL}*"):
            if left == partial or step_of(left.name.removeprefix(_PARTIAL).rpartition("-")[0]) < step_of(name):
                shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        free = shutil.disk_usage(partial).free
        if size > free:
            raise OSError(f"No space left on device: {size:,} bytes are needed, {free:,} are free")
        return FileSystemWriter(partial, per_thread_copy_ahead=0)

    def commit(self, name: str, manifest: str) -> None:
        partial, final = self._partial(name), self._path / name
        _write_synced(partial / FILE, manifest)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        beside = self._path / f".{LATEST}"
        _write_synced(beside, self.complete()[0] + "\n")
        beside.replace(self._path / LATEST)
        _sync_directory(self._path)

    def abandon(self, name: str) -> None:
        shutil.rmtree(self._partial(name), ignore_errors=True)

    def remove(self, name: str) -> None:
        hidden = self._partial(name)
        (self._path / name).rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def set_aside(self, name: str) -> Path:
        aside = self._path / free_name(name, {path.name for path in self._path.iterdir()})
        return (self._path / name).rename(aside)

    def _partial(self, name: str) -> Path:
        return self._path / f"{_PARTIAL}{name}-{self._writer}"


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    """Put the names in a directory on the disk: only then may older checkpoints go."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
