"""What a tracker has recorded of a run, so that whoever continues it neither repeats nor leaves out a value."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class Ledger:
    """A small file beside what a tracker writes: who writes, the last step of each name, and the sizes of files.

    A worker that was dropped while it hung may wake up: it sees that another one writes now, and stops.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owner = secrets.token_hex(8)
        self.last: dict[str, int] = {}

    def take(self, folder: Path, below: int | None) -> None:
        """Become the one that writes; cut files to their known sizes.

        Args:
            folder: of the files.
            below: forget later steps than those below it; none: keep all.
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
        """Whether nobody else has begun to write since."""
        return self._read().get("owner") == self._owner

    def save(self, folder: Path, files: Iterable[Path]) -> None:
        """Record what has been written, unless somebody else writes by now."""
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
