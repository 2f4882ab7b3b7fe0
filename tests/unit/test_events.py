"""Records of what happens."""

import json
import logging
import threading
from pathlib import Path

import pytest

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


def test_a_record_has_the_step_that_it_is_about(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 3)
    log.mark("start")
    log.step = 7
    log.mark("exchange")
    log.mark("checkpoint", step=5)
    log.mark("update", step=None)
    log.close()
    assert [one.get("step") for one in records(tmp_path / "rank-3.jsonl")] == [None, 7, 5, None]
    assert "step" not in records(tmp_path / "rank-3.jsonl")[3]


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


def test_a_disk_that_stalls_at_the_end_is_named_with_the_number_of_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two records are in the write that stalls, and one waits."""
    began, released, ended = threading.Event(), threading.Event(), list[str]()

    def stall(path: Path, lines: str) -> None:
        began.set()
        assert released.wait(30)
        ended.append(lines)

    monkeypatch.setattr("paceline.events._FLUSH_SECONDS", 30.0)
    monkeypatch.setattr("paceline.events._CLOSE_SECONDS", 0.0)
    log = EventLog(tmp_path, rank=3, append=stall)
    for step in range(2):
        log.mark("step", step=step)
    writer = threading.Thread(target=log.flush)
    writer.start()
    assert began.wait(30)
    log.mark("step", step=2)
    log.close()
    released.set()
    writer.join()
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert f"{tmp_path / 'rank-3.jsonl'}: 3 event records were not written" in warning.getMessage()
    assert ended[0].count("\n") == 2


def test_a_disk_that_takes_all_at_the_end_is_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(tmp_path, rank=3)
    log.mark("step", step=1)
    log.close()
    assert len(records(tmp_path / "rank-3.jsonl")) == 1
    assert caplog.records == []
