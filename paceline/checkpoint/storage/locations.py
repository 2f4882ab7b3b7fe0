"""Paths and URLs of checkpoints, and their storage."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.checkpoint.storage.base import Storage, writer_of
from paceline.checkpoint.storage.folder import Folder
from paceline.checkpoint.storage.object_store import ObjectStore


def storage_at(location: Path | str) -> Storage:
    """Open the storage at a path or URL. Raises ConfigError if a package that the URL needs is not installed."""
    return ObjectStore(str(location)) if is_url(location) else Folder(Path(location))


def place(text: str) -> Path | str:
    return text if is_url(text) else Path(text)


def is_url(location: Path | str) -> bool:
    """Return whether a location is a URL such as ``s3://bucket/run``."""
    return isinstance(location, str) and re.match(r"\w[\w+.-]*://", location) is not None


def split(location: Path | str) -> tuple[Path | str, str]:
    """Split the location of a checkpoint into its storage and its name, ``<step>`` or ``<step>/<writer>``."""
    url = is_url(location)
    whole = str(location).rstrip("/") if url else str(Path(location).absolute())
    parts = 2 if writer_of(whole) else 1
    parent, *names = whole.rsplit("/", parts)
    return parent if url else Path(parent or "/"), "/".join(names)


def same(one: Path | str, other: Path | str) -> bool:
    if is_url(one) or is_url(other):
        return str(one).rstrip("/") == str(other).rstrip("/")
    return Path(one).resolve() == Path(other).resolve()
