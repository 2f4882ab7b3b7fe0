"""Records of what happens."""

import json
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.comm.transport.base import Message
from paceline.comm.transport.gloo import Gloo
from paceline.comm.waiting import RecordedTransfer, Waiting
from paceline.comm.world import World
from paceline.coordinator.types import Membership
from paceline.events import EventLog, Level, seconds_without_core


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


@pytest.mark.parametrize(
    ("level", "kept"),
    [("minimal", {"step"}), ("steps", {"step", "exchange"}), ("operations", {"step", "exchange", "wait"})],
)
def test_a_level_leaves_out_events(tmp_path: Path, level: Level, kept: set[str]) -> None:
    log = EventLog(tmp_path, 0)
    log.level = level
    for event in ("step", "exchange", "wait"):
        log.mark(event)
    with log.span("exchange"):
        pass
    log.close()
    assert {one["event"] for one in records(tmp_path / "rank-0.jsonl")} == kept


def test_waits_and_transfers_are_recorded_with_their_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, object]] = []
    waiting, now = Waiting(Membership(0, 3), 10.0), [0.0]
    waiting.clock = lambda: now[0]
    waiting.mark = lambda event, **fields: found.append({"event": event, **fields})
    with waiting.awaiting("to send the output of stage 0"):
        for ranks, seconds in (((1, 2), 1.0), ((2,), 2.0), ((), 5.0)):
            waiting.waits_for(ranks)
            now[0] += seconds
    what = {"what": "to send the output of stage 0"}
    assert found == [
        {"event": "wait", "ranks": (1, 2), "seconds": 1.0, **what},
        {"event": "wait", "ranks": (2,), "seconds": 2.0, **what},
    ]
    times = iter([3.0, 3.5])
    monkeypatch.setattr("paceline.comm.waiting.time.perf_counter", lambda: next(times))
    transfer = RecordedTransfer(waiting, SimpleNamespace(wait=lambda: None), [1], "here", "send", 64)
    transfer.wait()
    assert found[-1] == {"event": "transfer", "way": "send", "ranks": [1], "bytes": 64, "what": "here", "seconds": 0.5}


@pytest.mark.parametrize("together", [False, True])
def test_each_message_is_recorded(together: bool) -> None:
    found: list[tuple[object, ...]] = []
    world: Any = World(Membership(0, 3), Gloo(same_host=False), Gloo(same_host=False), 10.0)
    work: Any = SimpleNamespace(wait=lambda: None)
    started = [(work, [1, 2])] if together else [(work, [1]), (work, [2])]
    world.transport = SimpleNamespace(start=lambda *_: started)
    sends, receives = [Message(torch.zeros(4), 2, 0)], [Message(torch.zeros(2), 1, 0)]
    assert not any(isinstance(one, RecordedTransfer) for one in world.start_transfers(sends, receives))
    world.mark = lambda event, **fields: (
        event == "wait" or found.append((fields["way"], fields["ranks"], fields["bytes"]))
    )
    for transfer in world.start_transfers(sends, receives):
        transfer.wait()
    assert found == ([("exchange", [1, 2], 24)] if together else [("receive", [1], 8), ("send", [2], 16)])


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


def test_two_logs_of_a_process_do_not_write_at_once(tmp_path: Path) -> None:
    """Or the end of the file that one of them sees is not the end of a line."""
    together = threading.Barrier(2)
    met: list[bool] = []

    def append(*_: object) -> None:
        met.append(_meet(together))

    first, second = (EventLog(tmp_path, 0, append=append) for _ in range(2))
    for log in (first, second):
        log.mark("step")
    other = threading.Thread(target=first.flush)
    other.start()
    second.flush()
    other.join()
    assert met == [False, False]
    first.close()
    second.close()


def _meet(barrier: threading.Barrier) -> bool:
    try:
        barrier.wait(timeout=0.2)
    except threading.BrokenBarrierError:
        return False
    return True


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


def test_the_time_for_which_a_thread_has_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    before = seconds_without_core()
    assert seconds_without_core() >= before >= 0.0
    monkeypatch.setattr("os.read", lambda *_: b"5 2500000000 1")
    assert seconds_without_core() == (2.5 if Path("/proc/thread-self/schedstat").exists() else 0.0)
    monkeypatch.setattr("os.read", lambda *_: b"")
    assert seconds_without_core() == 0.0
