"""Record of what a tracker has written for a run, so that its successor neither repeats nor skips values."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class Ledger:
    """Small file beside a tracker's output, with the current writer, the last step of each name and the file sizes.

    A worker that was dropped while it hung may resume. It then sees that another worker is the writer, and stops.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owner = secrets.token_hex(8)
        self.last: dict[str, int] = {}

    def take(self, folder: Path, below: int | None) -> None:
        """Become the writer, and truncate files to their known sizes.

        Args:
            below: first step whose records are forgotten. None keeps all records.
        """
        known = self._read()
        self.last = dict(known.get("last", {}))
        if below is not None:
            self.last = {name: min(step, below - 1) for name, step in self.last.items()}
        self._write(known.get("files", {}))
        for name, size in known.get("files", {}).items():
            with contextlib.suppress(FileNotFoundError):
                if (folder / name).stat().st_size > size:
                    os.truncate(folder / name, size)

    @property
    def owned(self) -> bool:
        """Whether this worker is still the writer."""
        return self._read().get("owner") == self._owner

    def save(self, folder: Path, files: Iterable[Path]) -> None:
        """Record the last steps and the file sizes, unless another writer has taken over."""
        if self.owned:
            self._write({str(path.relative_to(folder)): path.stat().st_size for path in files})

    def _read(self) -> dict[str, Any]:
        try:
            known = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def _write(self, files: Mapping[str, int]) -> None:
        beside = self._path.with_suffix(f".{self._owner}")
        beside.write_text(json.dumps({"owner": self._owner, "last": self.last, "files": files}))
        beside.replace(self._path)
