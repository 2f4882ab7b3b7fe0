"""Paths and URLs of checkpoints, and the storage behind each."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.checkpoint.folder import Folder
from paceline.checkpoint.object_store import ObjectStore
from paceline.checkpoint.storage import Storage


def storage_at(location: Path | str) -> Storage:
    """Open the storage at a path or URL.

    Raises:
        ConfigError: a package that the URL needs is not installed.
    """
    return ObjectStore(str(location)) if is_url(location) else Folder(Path(location))


def is_url(location: Path | str) -> bool:
    """Tell a URL such as ``s3://bucket/run`` from a path."""
    return isinstance(location, str) and re.match(r"\w[\w+.-]*://", location) is not None


def split(location: Path | str) -> tuple[Path | str, str]:
    """Split the location of a checkpoint into its storage and its name there."""
    if is_url(location):
        parent, _, name = str(location).rstrip("/").rpartition("/")
        return parent, name
    path = Path(location).absolute()
    return path.parent, path.name


def same(one: Path | str, other: Path | str) -> bool:
    """Whether two locations are the same."""
    if is_url(one) or is_url(other):
        return str(one).rstrip("/") == str(other).rstrip("/")
    return Path(one).resolve() == Path(other).resolve()
