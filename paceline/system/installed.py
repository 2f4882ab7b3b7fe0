"""Versions of installed packages and hashes of files, by which machines and runs are compared."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from pathlib import Path

from paceline.system.regular_files import open_regular


@functools.cache
def version(package: str) -> str | None:
    """Return the version of an installed package without importing it, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def file_hash(path: Path) -> str | None:
    """Return the first 16 hex digits of a file's SHA-256, or None if the file cannot be read."""
    try:
        with open_regular(path) as file:
            return hashlib.sha256(file.read()).hexdigest()[:16]
    except OSError:
        return None
