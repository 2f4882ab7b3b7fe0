"""Checkpoints at a URL, through fsspec: object stores (``s3://``, ``gs://``, ``az://``), ``memory://``, and others.

An object store has neither renames nor directories. So a checkpoint is written under its final name, with the manifest
last, and does not count without a manifest. Removal deletes the manifest first.

``exists``, ``find`` and ``rm(recursive=True)`` of fsspec treat every error as absence, so they are not used.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any, BinaryIO

from paceline.checkpoint.manifest import FILE, step_of
from paceline.checkpoint.storage.base import FENCED, LATEST, Storage, Writer, free_name, split, writer_of
from paceline.errors import ConfigError
from paceline.system.regular_files import NotRegularError

_WRITERS = ".writers"
_ATTEMPTS = 10


class ObjectStore(Storage):
    """Checkpoint storage at a URL. Requires atomic puts, visible to every later list, but no conditional puts.

    Files ``.writers/<writer>`` publish the names of writers. A writer that removes an unfinished checkpoint of another
    writer first adds a file ``fenced``, so that a late manifest does not complete it. The empty ``fenced`` file stays.

    Raises:
        ConfigError: fsspec, or its package for this kind of URL, is not installed.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        try:
            from fsspec.core import url_to_fs

            self._files: Any
            self._files, self._root = url_to_fs(self._url)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"checkpoint.directory = {url!r} cannot be used: {error}. URLs need pip install "
                f"'paceline[object-store]', and the package of fsspec for the kind of store, such as s3fs or gcsfs."
            ) from None

    def location(self, name: str = "") -> str:
        return f"{self._url}/{name}" if name else self._url

    def names(self, *parts: str) -> list[str]:
        self._files.invalidate_cache()  # other processes write too
        found = self._files.ls(self._path(*parts), detail=False)
        return [name for path in found if (name := path.rstrip("/").rpartition("/")[2])]

    def writers(self) -> set[Writer]:
        return {writer for name in self.files_of(_WRITERS) if (writer := writer_of(name))}

    @contextlib.contextmanager
    def open(self, name: str, file: str) -> Iterator[BinaryIO]:
        path = self._path(name, file)
        if not self._is_regular(path):
            raise NotRegularError(errno.EINVAL, "not a regular file", path)
        with self._files.open(path, "rb") as opened:
            yield opened

    def begin(self, step: str, writer: Writer, size: int) -> None:
        self._show(writer)
        self.check_fence(writer)
        name = f"{step}/{writer}"
        self._remove_files(name)
        for attempt in range(_ATTEMPTS):
            try:
                self._files.makedirs(self._path(name), exist_ok=True)
                break
            except FileNotFoundError:  # on file://, another writer has just removed the empty directory of the step
                if attempt == _ATTEMPTS - 1:
                    raise

    def create(self, step: str, writer: Writer, file: str) -> AbstractContextManager[BinaryIO]:
        opened: AbstractContextManager[BinaryIO] = self._files.open(self._path(step, str(writer), file), "wb")
        return opened

    def commit(self, step: str, writer: Writer, manifest: str, keep: Collection[str]) -> None:
        self.check_fence(writer)
        self._write(self._path(step, str(writer), FILE), manifest)
        self._note_latest()
        self._remove_unfinished(step, writer)

    def abandon(self, step: str, writer: Writer) -> None:
        name = f"{step}/{writer}"
        if FILE not in self.files_of(name):
            self._remove_files(name)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name, FILE))
        self._remove_files(name)

    def set_aside(self, name: str) -> str:
        aside = free_name(split(name)[0], self.names())
        self._files.makedirs(self._path(aside), exist_ok=True)
        files = [file for file in self.names(name) if not writer_of(file)]
        for file in sorted(files, key=FILE.__eq__):  # moving a directory fails on stores without directories
            if self._is_regular(self._path(name, file)):
                self._files.cp_file(self._path(name, file), self._path(aside, file))
        self.remove(name)
        self._note_latest()
        return self.location(aside)

    def _path(self, *parts: str) -> str:
        return "/".join([self._root.rstrip("/"), *(part for part in parts if part)])

    def _is_regular(self, path: str) -> bool:
        """Return whether a path is a regular file. ``file://`` may hold links, and pipes that block on open."""
        about = self._files.info(path)
        return about["type"] == "file" and not about.get("islink")

    def _show(self, writer: Writer) -> None:
        """Publish the name of a writer, and remove the names of earlier writers, which are no longer needed."""
        self._files.makedirs(self._path(_WRITERS), exist_ok=True)
        known = self.writers()
        if writer not in known:
            self._files.pipe_file(self._path(_WRITERS, str(writer)), b"")
        for other in known:
            if other.is_before(writer):
                self._remove_file(_WRITERS, str(other))

    def _remove_unfinished(self, newest: str, writer: Writer) -> None:
        """Remove unfinished checkpoints of earlier steps.

        Later steps stay: their manifests may still be in flight, and only a conditional put could rule that out.
        """
        for step in self.steps():
            if step_of(step) >= step_of(newest):
                continue
            for name in self.attempts(step):
                other, files = writer_of(name), set(self.files_of(name))
                if other is None or FILE in files or files == {FENCED} or not writer.may_remove(other):
                    continue
                if files:
                    self._files.pipe_file(self._path(name, FENCED), b"")
                self._remove_files(name)
            self._remove_directory(step)

    def _remove_files(self, name: str) -> None:
        """Remove all files of an incomplete checkpoint except ``fenced``."""
        for file in self.files_of(name):
            if file != FENCED and not writer_of(file):
                self._remove_file(name, file)
        self._remove_directory(name)
        self._remove_directory(split(name)[0])

    def _remove_directory(self, name: str) -> None:
        """Remove a directory if it is empty. Only file systems have directories."""
        with contextlib.suppress(OSError, NotImplementedError):
            self._files.rmdir(self._path(name))

    def _remove_file(self, *parts: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(*parts))

    def _note_latest(self) -> None:
        found = self.complete()
        self._files.pipe_file(self._path(LATEST), ((split(found[0])[0] if found else "none") + "\n").encode())

    def _write(self, path: str, text: str) -> None:
        self._files.pipe_file(f"{path}.new", text.encode())
        self._files.mv(f"{path}.new", path)
