"""A warning of a rank that the terminal does not show is told at the end of the run."""

import json
from pathlib import Path

from paceline.cli.report import warnings_elsewhere


def write(folder: Path, rank: int, *notes: tuple[str, bool]) -> None:
    records = [
        {
            "time": 1.0,
            "event": "note",
            "rank": rank,
            "generation": 0,
            "text": text,
            **({"warning": True} if loud else {}),
        }
        for text, loud in notes
    ]
    lines = [json.dumps({"time": 1.0, "event": "step", "rank": rank, "generation": 0}), *map(json.dumps, records)]
    (folder / f"rank-{rank}.jsonl").write_text("\n".join(lines) + "\n")


def test_each_text_once_with_its_ranks(tmp_path: Path) -> None:
    write(tmp_path, 0, ("all say it", True), ("one by one: 1.2", False))
    write(tmp_path, 1, ("all say it", True), ("one by one: 1.3", False), ("not rank 0", True), ("mine", True))
    write(tmp_path, 2, ("all say it", True), ("not rank 0", True), ("not rank 0", True))
    assert warnings_elsewhere(tmp_path) == ["ranks 1, 2: not rank 0", "rank 1: mine"]


def test_what_is_cut_off_or_no_record(tmp_path: Path) -> None:
    assert warnings_elsewhere(tmp_path / "none") == []
    broken = (
        '{"warning": true}\n{"time": 1.0, "event": "note", "rank": 1, "generation": 0, "warning": true, "text": "cut'
    )
    (tmp_path / "rank-1.jsonl").write_text(broken)
    assert warnings_elsewhere(tmp_path) == []
