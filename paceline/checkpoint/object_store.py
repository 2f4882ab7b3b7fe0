"""Checkpoints at a URL, through fsspec: object stores (``s3://``, ``gs://``, ``az://``), ``memory://``, and others.

An object store has neither rename nor directories. So a checkpoint is written under its final name, the manifest last;
without a manifest it does not count, and the next save removes it. Removal deletes the manifest first.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from paceline.checkpoint.manifest import FILE, newest_first, step_of
from paceline.checkpoint.storage import LATEST, free_name, read_manifest
from paceline.errors import ConfigError
from paceline.regular_files import NotRegularError


class ObjectStore:
    """Checkpoints at a URL.

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

    def complete(self) -> list[str]:
        return newest_first(name for name in self._names() if self._has_manifest(name))

    def manifest(self, name: str) -> str:
        with self.open(name, FILE) as file:
            return read_manifest(file)

    @contextmanager
    def open(self, name: str, file: str) -> Iterator[BinaryIO]:
        path = self._path(name, file)
        if self._files.info(path)["type"] != "file":  # file:// may hold a pipe, at which opening would wait
            raise NotRegularError(errno.EINVAL, "not a regular file", path)
        with self._files.open(path, "rb") as opened:
            yield opened

    def begin(self, name: str, size: int) -> None:
        for left in self._names():
            if 0 <= step_of(left) <= step_of(name) and not self._has_manifest(left):
                self._files.rm(self._path(left), recursive=True)
        self._files.makedirs(self._path(name), exist_ok=True)

    @contextmanager
    def create(self, name: str, file: str) -> Iterator[BinaryIO]:
        with self._files.open(self._path(name, file), "wb") as opened:
            yield opened

    def commit(self, name: str, manifest: str) -> None:
        self._write(self._path(name, FILE), manifest)
        self._write(self._path(LATEST), name + "\n")

    def abandon(self, name: str) -> None:
        if self._files.exists(self._path(name)) and not self._has_manifest(name):
            self._files.rm(self._path(name), recursive=True)

    def remove(self, name: str) -> None:
        self._files.rm_file(self._path(name, FILE))
        self._files.rm(self._path(name), recursive=True)

    def set_aside(self, name: str) -> str:
        aside = free_name(name, set(self._names()))
        before, after = self._path(name), self._path(aside)
        self._files.makedirs(after, exist_ok=True)
        for path in self._files.find(before):  # moving a directory fails on stores without directories
            self._files.cp_file(path, after + path.removeprefix(before))
        self.remove(name)
        return self.location(aside)

    def _path(self, *parts: str) -> str:
        return "/".join([self._root.rstrip("/"), *parts])

    def _names(self) -> list[str]:
        self._files.invalidate_cache()  # other processes write too
        try:
            found = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in found]

    def _has_manifest(self, name: str) -> bool:
        return bool(self._files.exists(self._path(name, FILE)))

    def _write(self, path: str, text: str) -> None:
        """Write a file atomically on any kind of store."""
        self._files.pipe_file(f"{path}.new", text.encode())
        self._files.mv(f"{path}.new", path)
