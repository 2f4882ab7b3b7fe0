"""A warning of a rank that the terminal does not show is told at the end of the run."""

import json
from pathlib import Path

import pytest

from paceline.cli.report import report, warnings_elsewhere
from paceline.launchers.base import Launch, RunResult, WorkerExit


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


def test_a_failed_run_shows_them_after_its_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Briefly: the first three, each cut at its length, and the number of the others."""
    for folder in ("errors", "output", "events"):
        (tmp_path / folder).mkdir()
    launch = Launch(Path("train.py"), (), 0, tmp_path, {})
    for rank in range(2):
        launch.output(rank).write_text("")
    write(tmp_path / "events", 0, ("all say it", True))
    long = "long " * 100
    write(tmp_path / "events", 1, ("all say it", True), ("first", True), (long, True), ("third", True), ("last", True))
    ended = WorkerExit(0, 0, 1.0, False), WorkerExit(1, 3, 2.0, False)
    assert report(launch, RunResult(ended, None, 1.0), None) == 3
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("rank 1: ")
    shown = [line for line in said if line.startswith("warned before: ")]
    assert said[-4:] == shown
    assert shown[0] == "warned before: rank 1: first" and shown[2] == "warned before: rank 1: third"
    assert shown[1].startswith("warned before: rank 1: long long") and len(shown[1]) < 330
    assert shown[3].startswith("warned before: 1 more")
    assert (tmp_path / "failure.txt").read_text().splitlines()[-4:] == shown
