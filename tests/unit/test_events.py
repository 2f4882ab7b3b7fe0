"""Records of what happens."""

import json
from pathlib import Path

from paceline.events import EventLog


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_marks_and_spans_are_lines(tmp_path: Path) -> None:
    log = EventLog(tmp_path, rank=3)
    log.mark("step", step=7, loss=0.5)
    try:
        with log.span("save", step=8):
            raise OSError
    except OSError:
        pass
    log.close()
    first, second = records(tmp_path / "rank-3.jsonl")
    assert (first["event"], first["rank"], first["step"], first["loss"]) == ("step", 3, 7, 0.5)
    assert second["event"] == "save"
    assert isinstance(second["seconds"], float)


def test_without_a_directory_nothing_is_written(tmp_path: Path) -> None:
    log = EventLog(None, rank=0)
    log.mark("step")
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_counted_and_training_goes_on(tmp_path: Path) -> None:
    log = EventLog(tmp_path, rank=0)
    path = tmp_path / "rank-0.jsonl"
    path.mkdir()
    log.mark("step", step=1)
    log.mark("step", step=2)
    log.close()
    assert log.lost >= 2


def test_a_line_that_a_killed_worker_has_not_ended_costs_nobody_else_a_record(tmp_path: Path) -> None:
    path = tmp_path / "rank-1.jsonl"
    path.write_text('{"event": "step"}\n{"event": "st')
    log = EventLog(tmp_path, rank=1)
    log.mark("recovered", text="Zürich")
    log.flush()
    log.mark("step")
    log.close()
    first, cut, *rest = path.read_text().splitlines()
    assert (first, cut) == ('{"event": "step"}', '{"event": "st')
    assert [json.loads(line)["event"] for line in rest] == ["recovered", "step"]
