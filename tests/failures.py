"""What a failed test leaves in ``test-failures/``: its report, and the output and events of its processes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "test-failures"
_KEPT = {".log", ".out", ".err", ".jsonl", ".json", ".py", ".toml", ".txt"}
_LARGEST = 4 << 20
_SHOWN_LINES = 30
_SHOWN = {".log", ".out", ".err"}
used: list[Path] = []
"""Folders in which the present test has run processes."""


def keep(test: str, report: str, directories: Iterable[Path], afresh: bool) -> Path:
    """Copy the report and the text files below the directories to a folder of this test; return the folder.

    It stays when the test passes again: one that failed by chance may not do so for days.

    Args:
        test: its id.
        report: of its failure.
        directories: in which it has run processes.
        afresh: whether to remove what an earlier failure of the test has left.
    """
    folder = FOLDER / re.sub(r"[^\w.=-]+", "_", test)[-150:]
    if afresh:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.txt").write_text(report)
    for number, directory in enumerate(dict.fromkeys(directories)):
        for path in _files(directory):
            copy = folder / f"{number}-{directory.name}" / path.relative_to(directory)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    return folder


def last_lines(folder: Path) -> str:
    """Return the end of each process's output in a folder."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.suffix in _SHOWN):
        if lines := path.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]:
            found += [f"-- {path.relative_to(folder)}", *lines]
    return "\n".join(found)


def _files(directory: Path) -> list[Path]:
    wanted = (path for path in directory.rglob("*") if path.suffix in _KEPT and not path.is_symlink())
    return [path for path in wanted if path.is_file() and path.stat().st_size <= _LARGEST]
