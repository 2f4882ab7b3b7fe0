"""CSV file of lines ``step,name,value,time``, so that a new name may appear at any step."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from paceline.adapters.trackers.base import TrackedRun, Tracker, Values

_HEADER = ["step", "name", "value", "time"]


class CsvTracker(Tracker):
    """Tracker that appends to ``metrics.csv``. Texts and images are recorded by path."""

    def __init__(self, path: Path, position: int) -> None:
        self._path = path
        if path.exists():
            _remove_from(path, position)
        else:
            _write(path, [])
        self._file = path.open("a", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")

    def write(self, values: Sequence[Values]) -> None:
        """Append a line for each value."""
        for one in values:
            for name, value in {**one.scalars, **one.texts, **one.images}.items():
                self._writer.writerow([one.step, name, value, f"{one.time:.3f}"])
        self._file.flush()

    def files(self) -> Sequence[Path]:
        """Return the file."""
        return (self._path,)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_tracker(run: TrackedRun) -> Tracker:
    return CsvTracker(run.folder / "metrics.csv", run.position)


def _remove_from(path: Path, position: int) -> None:
    with path.open(newline="") as file:
        rows = [row for row in csv.reader(file) if row != _HEADER]
    kept = [row for row in rows if len(row) == len(_HEADER) and int(row[0]) < position]
    if len(kept) < len(rows):
        _write(path, kept)


def _write(path: Path, rows: list[list[str]]) -> None:
    beside = path.with_suffix(".tmp")
    with beside.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([_HEADER, *rows])
    beside.replace(path)
