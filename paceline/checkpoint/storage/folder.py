"""Checkpoints in a folder, either local or shared by several machines."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from paceline.checkpoint.manifest import FILE
from paceline.checkpoint.storage.base import LATEST, Storage, Writer, free_name, split, writer_of
from paceline.system.regular_files import open_regular

_PARTIAL = ".partial-"
_PARTS = "parts"
_TRASH = ".trash-"
_NOTE = f".{LATEST}-"


class Folder(Storage):
    """Checkpoint storage in a folder. Requires that renaming a directory is atomic and fails if the target has files.

    A save writes to ``.partial-<step>-<writer>``, which becomes ``<step>/<writer>`` by one rename. Removal renames a
    directory to ``.trash-...`` first, so a late writer finds all of its files or none. Ranks other than 0 write to
    ``.partial-.../parts``. The save moves the shards that it needs out of ``parts`` and removes ``parts`` before the
    checkpoint is complete, so a late rank adds no file to a complete checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def location(self, name: str = "") -> Path:
        return self._path / name

    def names(self, *parts: str) -> list[str]:
        return os.listdir(self._path.joinpath(*parts))

    def writers(self) -> set[Writer]:
        found = {writer for _, writer in self._partials()}
        for step in self.steps():
            found |= {writer for name in self.attempts(step) if (writer := writer_of(name))}
        return found

    def open(self, name: str, file: str) -> BinaryIO:
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in name.split("/") if name else ():
                outer, folder = folder, os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                os.close(outer)
            return open_regular(file, folder, links=False)
        finally:
            os.close(folder)

    def begin(self, step: str, writer: Writer, size: int) -> None:
        partial = self._partial(step, writer)
        self._discard(partial)
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial.mkdir(mode=0o700)
        (partial / _PARTS).mkdir(mode=0o700)
        self.check_fence(writer)
        for path, other in self._partials():
            if path != partial and writer.may_remove(other):
                self._discard(path)
        for name in self.names():
            if name.startswith(_TRASH):
                shutil.rmtree(self._path / name, ignore_errors=True)
            if name.startswith(_NOTE):
                (self._path / name).unlink(missing_ok=True)
        for name in self.steps():
            self._remove_empty(name)
        free = shutil.disk_usage(partial).free
        if size > free:
            raise OSError(errno.ENOSPC, f"No space left on device: {size:,} bytes are needed, {free:,} are free")

    def create(self, step: str, writer: Writer, file: str) -> AbstractContextManager[BinaryIO]:
        return _created(self._partial(step, writer) / file)

    def begun(self, step: str, launch: int, generation: int) -> Writer | None:
        for path, writer in self._partials():
            if (writer.launch, writer.generation) == (launch, generation) and path == self._partial(step, writer):
                return writer if (path / _PARTS).is_dir() else None
        return None

    def create_part(self, step: str, writer: Writer, file: str) -> AbstractContextManager[BinaryIO]:
        return _created(self._partial(step, writer) / _PARTS / file)

    def read_part(self, step: str, writer: Writer, file: str, most: int) -> bytes | None:
        try:
            with self.open(f"{self._partial(step, writer).name}/{_PARTS}", file) as opened:
                size = opened.seek(0, 2)
                opened.seek(0)
                return opened.read(min(size, most))
        except FileNotFoundError:
            return None

    def commit(self, step: str, writer: Writer, manifest: str, keep: Collection[str]) -> None:
        partial, final = self._partial(step, writer), self._path / step / str(writer)
        for name in set(keep).difference(self.files_of(partial.name)):
            _rename(partial / _PARTS / name, partial / name)
        self._discard(partial / _PARTS)
        _write_synced(partial / FILE, manifest)
        sync_directory(partial)
        self.check_fence(writer)
        self._publish(partial, final)
        sync_directory(final.parent)
        sync_directory(self._path)
        self._note_latest(writer)

    def abandon(self, step: str, writer: Writer) -> None:
        self._discard(self._partial(step, writer))

    def remove(self, name: str) -> None:
        self._discard(self._path / name)
        self._remove_empty(name)

    def set_aside(self, name: str) -> Path:
        while True:
            aside = self._path / free_name(split(name)[0], self.names())
            try:
                (self._path / name).rename(aside)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            else:
                break
        self._remove_empty(name)
        self._note_latest(Writer(0, 0, os.urandom(4).hex()))
        return aside

    def _partial(self, step: str, writer: Writer) -> Path:
        return self._path / f"{_PARTIAL}{step}-{writer}"

    def _partials(self) -> list[tuple[Path, Writer]]:
        """Return the directories and writers of unfinished checkpoints."""
        found = []
        for name in self.files_of(""):
            _, _, rest = name.removeprefix(f"{_PARTIAL}step-").partition("-")
            writer = writer_of(rest)
            if name.startswith(_PARTIAL) and writer:
                found.append((self._path / name, writer))
        return found

    def _publish(self, partial: Path, final: Path) -> None:
        """Complete a checkpoint. The step's directory may vanish when another checkpoint in it is removed."""
        while True:
            final.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                return _rename(partial, final)
            except FileNotFoundError:
                if not partial.exists():
                    raise

    def _discard(self, path: Path) -> None:
        """Remove a directory, atomically for other processes."""
        trash = self._path / f"{_TRASH}{os.urandom(8).hex()}"
        try:
            path.rename(trash)
        except FileNotFoundError:
            return
        shutil.rmtree(trash, ignore_errors=True)

    def _remove_empty(self, name: str) -> None:
        with contextlib.suppress(OSError):  # the directory has another checkpoint of this step
            (self._path / split(name)[0]).rmdir()

    def _note_latest(self, writer: Writer) -> None:
        """Write the name of the newest step to the file ``latest``."""
        found = self.complete()
        beside = self._path / f"{_NOTE}{writer.token}"
        with contextlib.suppress(FileNotFoundError):  # another writer has removed the file, and writes its own
            _write_synced(beside, (split(found[0])[0] if found else "none") + "\n")
            beside.replace(self._path / LATEST)
        sync_directory(self._path)


def _rename(path: Path, target: Path) -> None:
    try:
        path.rename(target)
    except FileNotFoundError:
        if not target.exists():  # a network folder did the rename, but the reply was lost
            raise


def _write_synced(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with _created(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def _created(path: Path) -> Iterator[BinaryIO]:
    """Open a new file. On a normal exit it is flushed to disk."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Flush the entries of a directory to disk. Older checkpoints may be removed only after that."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
