"""Where the time of the last steps of a run went, from the ends of its event files, which takes no time to read."""

from __future__ import annotations

import math
import os
from pathlib import Path

from paceline.observe.records import EVENT, Record, checked, parsed
from paceline.observe.why import EVENTS, find
from paceline.observe.why.culprits import Findings
from paceline.observe.why.text import sentences
from paceline.system.regular_files import open_regular

_HEAD_BYTES = 1 << 15
_END_BYTES = 1 << 18
_ENDS_BYTES = 1 << 21
"""Bytes that are read at the end of a run: the head of each file, its end, and the ends of all files at most."""
_LEAST_STEPS, _LEAST_SECONDS, _WORTH_SAYING = 20, 2.0, 0.05
"""Fewest steps, their least duration, and the smallest share that the last lines of a run mention."""


def last_line(run: Path) -> str:
    """Return the sentence for the end of a run. Empty if the run was short, or nothing takes much of its time."""
    findings = find_at_end(run)
    said = findings.steps >= _LEAST_STEPS and findings.seconds >= _LEAST_SECONDS
    if not said or not findings.culprits or findings.culprits[0].share < _WORTH_SAYING:
        return ""
    return f"{sentences(findings)[0]} (more: paceline why)"


def find_at_end(run: Path) -> Findings:
    """Return where the time of the last steps went, in the newest launch of the run.

    Returns no findings if the files of some ranks are elsewhere, or cannot be read.
    """
    paths = sorted((run / "events").glob("rank-*.jsonl"))
    records, stages = list[Record](), dict[int, int]()
    try:
        launched, workers = _newest_launch(run)
        for path in paths:
            found, forward = _ends_of(path, min(_END_BYTES, _ENDS_BYTES // len(paths)), launched)
            records += found
            stages |= forward
    except OSError:
        return Findings()
    if workers is None:
        workers = max((one["workers"] for one in records if type(one.get("workers")) is int), default=0)
    there = {one["rank"] for one in records if one["event"] == "step"}
    return find(records, stages, whole=False) if len(there) >= workers else Findings()


def _newest_launch(run: Path) -> tuple[float, int | None]:
    """Return the time from which the newest launch of a run trains, and the number of workers at its end.

    The first launch has all records, whose clocks can differ from the launcher's. The number is None if no launcher
    has recorded it.
    """
    begins, workers = [-math.inf], None
    try:
        with open_regular(run / "events" / "launcher.jsonl") as file:
            for line in file:
                record = checked(line) if b'"membership"' in line else None
                if record is not None and isinstance(members := record.get("workers"), list):
                    workers = len(members)
                    begins += [record["time"]] if record["generation"] == 0 else []
    except FileNotFoundError:
        pass
    return begins[-1] if len(begins) > 2 else begins[0], workers


def _ends_of(path: Path, size: int, since: float) -> tuple[list[Record], dict[int, int]]:
    """Return the records at the end of a file, with the start of the session, and the stages of its rank."""
    with open_regular(path) as file:
        lines = file.read(_HEAD_BYTES).split(b"\n")[:-1]
        end = file.seek(0, os.SEEK_END)
        if end > _HEAD_BYTES:
            lines = [line for line in lines if b'"event": "start"' in line or b'"event": "cut"' in line]
            file.seek(max(_HEAD_BYTES, end - size))
            lines += file.read(size).split(b"\n")[1:-1]
    records, stages = [], dict[int, int]()
    for line in lines:
        if (name := EVENT.search(line)) is None or name[1].decode(errors="replace") not in (*EVENTS, "forward"):
            continue
        if (record := parsed(line)) is None or (record["time"] < since and record["event"] not in ("start", "cut")):
            continue
        if record["event"] != "forward":
            records.append(record)
        elif type(stage := record.get("stage")) is int:
            stages[record["rank"]] = min(stage, stages.get(record["rank"], stage))
    return records, stages
