"""Conversion of events to the values that trackers record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.adapters.trackers.base import Values

STEP_VALUES = ("loss", "learning_rate", "gradient_norm", "samples_per_second")
"""Fields of the event ``step`` that are recorded."""
WITH_VALUES = frozenset({"step", "evaluation", "metrics"})  # events that contain values
_TAIL_BYTES = 1 << 20


def values_of(record: Mapping[str, Any]) -> Values:
    """Return the values of an event ``step``, ``evaluation`` or ``metrics``."""
    scalars = {name: record[name] for name in STEP_VALUES if name in record}
    scalars |= record.get("metrics") or {}
    return Values(record["step"], record["time"], scalars, record.get("texts") or {}, record.get("images") or {})


def recorded(events: Path, run: str, position: int) -> list[Values]:
    """Read values before a position from the ends of event files, because a killed worker may not have sent them.

    Args:
        run: ID of the run. Records of other runs are left out.
    """
    found: list[Values] = []
    for path in sorted(events.glob("rank-*.jsonl")):
        of_file: list[Values] = []
        ours = True
        for record in _records_at_end(path):
            if record.get("event") == "start":
                ours = record.get("run") == run
                if not ours:
                    of_file.clear()
            elif ours and record.get("event") in WITH_VALUES and record.get("step", position) < position:
                of_file.append(values_of(record))
        found += of_file
    return found


def _records_at_end(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            start = max(file.seek(0, 2) - _TAIL_BYTES, 0)
            file.seek(start)
            lines = file.read().split(b"\n")
    except OSError:
        return []
    records = []
    for line in lines[1:] if start else lines:
        try:
            record = json.loads(line)
        except ValueError:  # half a line of a killed worker
            continue
        if isinstance(record, dict):
            records.append(record)
    return records
