"""What a failed test leaves in ``test-failures/``: its report, and the output and events of its processes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
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
            with contextlib.suppress(FileNotFoundError):  # processes of the test may still run
                shutil.copyfile(path, copy)
    return folder


def last_lines(folder: Path) -> str:
    """Return the end of each process's output in a folder."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.suffix in _SHOWN):
        if lines := path.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]:
            found += [f"-- {path.relative_to(folder)}", *lines]
    return "\n".join(found)


def _files(directory: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(directory):  # goes on where a folder vanishes
        for path in (Path(folder, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                found = path.lstat()
                if path.suffix in _KEPT and stat.S_ISREG(found.st_mode) and found.st_size <= _LARGEST:
                    yield path
