"""Checkpoints in a folder of this machine's file system."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from paceline.checkpoint.manifest import FILE, newest_first, step_of
from paceline.checkpoint.storage import LATEST, free_name, read_manifest
from paceline.regular_files import open_regular

_PARTIAL = ".partial-"


class Folder:
    """Checkpoints in a local folder; a complete one gets its name by one rename.

    A worker that was suspended and dropped may wake up in the middle of a save, or begin one for a step that others
    have long passed. So each writer uses partial names of its own, and never removes those of later steps.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = os.urandom(4).hex()

    def location(self, name: str = "") -> Path:
        return self._path / name

    def complete(self) -> list[str]:
        return newest_first(file.parent.name for file in self._path.glob(f"step-*/{FILE}"))

    def manifest(self, name: str) -> str:
        with self.open(name, FILE) as file:
            return read_manifest(file)

    def open(self, name: str, file: str) -> BinaryIO:
        folder = os.open(self._path / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            return open_regular(file, folder, links=False)
        finally:
            os.close(folder)

    def begin(self, name: str, size: int) -> None:
        partial = self._partial(name)
        for left in self._path.glob(f"{_PARTIAL}*"):
            if left == partial or step_of(left.name.removeprefix(_PARTIAL).rpartition("-")[0]) < step_of(name):
                shutil.rmtree(left, ignore_errors=True)
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial.mkdir(mode=0o700)
        free = shutil.disk_usage(partial).free
        if size > free:
            raise OSError(f"No space left on device: {size:,} bytes are needed, {free:,} are free")

    @contextmanager
    def create(self, name: str, file: str) -> Iterator[BinaryIO]:
        with _created(self._partial(name) / file) as opened:
            yield opened

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
    path.unlink(missing_ok=True)
    with _created(path) as file:
        file.write(text.encode())


@contextmanager
def _created(path: Path) -> Iterator[BinaryIO]:
    """Open a new file; on disk when it is closed."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    """Flush the entries of a directory to disk: only then may older checkpoints be removed."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
