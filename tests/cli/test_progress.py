import io
import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paceline.cli.display import progress, table
from paceline.cli.display.progress import Display, EventTail, LineDisplay, Progress
from paceline.cli.main import __file__ as main_file


def step(number: int, time: float, **more: object) -> dict[str, object]:
    return {
        "event": "step",
        "step": number,
        "time": time,
        "loss": 0.3125,
        "samples_per_second": 4100.4,
        **more,
    }


def test_progress_tells_step_loss_speed_and_time_left() -> None:
    seen = Progress()
    seen.take({"event": "batches", "position": 0, "steps": 500})
    assert seen.text() == "step 0/500"
    for number in range(120):
        seen.take(step(number, time=number * 0.5))
    assert seen.text() == "step 120/500  loss 0.3125  4100 samples/s  time left 0:03:10"


def test_progress_of_a_resumed_run_and_of_strange_records() -> None:
    seen = Progress()
    for record in (
        {"event": "note"},
        {},
        {"event": "step", "step": "?"},
        {"event": "batches", "position": 40},
    ):
        seen.take(record)
    assert seen.text() == "step 40"


def test_the_tail_reads_only_what_is_new_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_text('{"event": "old"}\n')
    tail = EventTail(path)
    with path.open("a") as file:
        for text, expected in (('{"a": 1}\n{"b"', [{"a": 1}]), (": 2}\n", [{"b": 2}]), ("no json\n3\n", [])):
            file.write(text)
            file.flush()
            assert tail.read() == expected
    assert EventTail(tmp_path / "missing").read() == []


def test_without_a_terminal_a_line_is_told_now_and_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    display = progress.display(tmp_path / "rank-0.jsonl", quiet=False)
    assert isinstance(display, LineDisplay)
    with display:
        (tmp_path / "rank-0.jsonl").write_text(json.dumps(step(4, 1.0)) + "\n")
    assert capsys.readouterr().err == "step 5  loss 0.3125  4100 samples/s\n"


@pytest.mark.parametrize("quiet", [False, True])
def test_what_starts_is_shown_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    records = {"event": "start"}, {"event": "note", "text": "2 workers"}, {"event": "note", "text": "a warning"}
    display = progress.display(tmp_path / "rank-0.jsonl", quiet)
    with display:
        (tmp_path / "rank-0.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    assert capsys.readouterr().err == ("" if quiet else "2 workers\n")


def test_workers_that_take_long_to_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    display = progress.display(tmp_path / "rank-0.jsonl", quiet=False)
    display.starting(2)
    with display:
        pass
    assert capsys.readouterr().err == "starting 2 workers: none has reached paceline.start yet\n"


def test_a_reader_that_goes_away_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        display = Display(tmp_path / "events")
        for _ in range(3):
            display.show("stdout", "hello")


def test_a_terminal_without_unicode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    Display(tmp_path / "events").show("stdout", "zwölf")
    assert stream.buffer.getvalue() == b"[rank 0] zw?lf\n"


BAR = """
import json, os, time
with open(os.environ["PACELINE_RUN"] + "/events/rank-0.jsonl", "w") as file:
    print('{"event": "batches", "position": 0, "steps": 2}', file=file)
    for number in range(2):
        record = {"event": "step", "step": number, "time": time.time(), "loss": 0.5}
        record["samples_per_second"] = 99.0
        print(json.dumps(record), file=file)
print("a [bold]line[/bold]")
"""


def test_on_a_terminal_a_bar_is_drawn_below_the_lines(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BAR)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "paceline.cli.main", "run", "train.py"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(main_file).parents[2]),
        "TERM": "xterm",
        "COLUMNS": "120",
    }
    process = subprocess.Popen(command, cwd=tmp_path, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""

    def read() -> None:
        nonlocal seen
        try:
            while data := os.read(ours, 4096):
                seen += data
        except OSError:
            return

    reader = threading.Thread(target=read)
    reader.start()
    assert process.wait(timeout=60) == 0
    reader.join(timeout=10)
    os.close(ours)
    text = seen.decode()
    assert "[rank 0] a [bold]line[/bold]" in text
    assert "2/2" in text
    assert "loss 0.5" in text
    assert "99 samples/s" in text


def test_table() -> None:
    rows = [("name", "what"), ("longer name", "a b"), ("x", "")]
    assert table.lines(rows) == ["name         what", "longer name  a b", "x"]
