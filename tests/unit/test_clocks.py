"""One clock: how machines compare theirs with the coordinator's, and what readers make of the records' times."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.coordinator.wire import clock as wire
from paceline.observe.index import RecordIndex, Search
from paceline.observe.ledger import read
from paceline.observe.tracing.clocks import Clock, Point, described
from paceline.observe.tracing.slices import workers_of

BEGIN = 1_790_000_000.0
AHEAD, DRIFT = 5.0, 5e-5


def theirs(time: float) -> float:
    """The time of a clock that is 5 s ahead at the start and gains 50 us each second."""
    return time + AHEAD + (time - BEGIN) * DRIFT


def compared(monkeypatch: pytest.MonkeyPatch, seconds: float, seed: int) -> list[dict[str, Any]]:
    """Return the comparisons that a worker of machine 1 records, over a network with delays of up to 20 ms."""
    draw, now, marked = random.Random(seed), [BEGIN], []
    monkeypatch.setattr(wire, "time", SimpleNamespace(time=lambda: theirs(now[0])))
    questions: list[dict[str, Any]] = []
    meter = wire.ClockMeter(1002, questions.append, lambda event, **fields: marked.append({"event": event, **fields}))
    while now[0] < BEGIN + seconds:
        meter.ask()
        while questions:
            now[0] += draw.choice([1e-4, 2e-4, 5e-3, 1e-2])
            answer = wire.answer(questions.pop(0), "a", now[0])
            now[0] += draw.choice([1e-4, 2e-4, 5e-3, 1e-2])
            meter.receive(answer)
        now[0] += 1.0
    return marked


@pytest.mark.parametrize("seed", range(5))
def test_a_clock_is_known_within_the_error_that_it_states(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    marked = compared(monkeypatch, 120.0, seed)
    assert 20 <= len(marked) <= 30 and {(one["machine"], one["launch"]) for one in marked} == {(1, "a")}
    clock = Clock(Point(one["time"], one["offset"], one["error"]) for one in marked)
    for second in range(-1, 130):
        time = BEGIN + second
        off = abs(clock.corrected(theirs(time)) - time)
        assert off <= clock.error(theirs(time)) and off <= 1e-3, second
    assert clock.drift == pytest.approx(-DRIFT, rel=0.2) and " s ahead at the start, gains 5" in described(clock)


def test_a_short_run_has_a_comparison_and_repeats_it_under_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[float] = []
    meter = wire.ClockMeter(0, lambda message: None, lambda event, **fields: marked.append(fields["error"]))
    meter.repeat()
    assert marked == []
    times = iter([8.0, 6.0, 7.0, 3.0, 4.0, 5.0, 5.0, 5.0])  # shorter than the time of the question: it was set back
    monkeypatch.setattr(wire, "time", SimpleNamespace(time=lambda: next(times)))
    monkeypatch.setattr(meter, "ask", lambda: None)
    for _ in range(8):
        meter.receive({"sent": 4.0, "at": 1.0, "launch": ""})
    meter.repeat()
    assert marked == [0.0, 0.0]


def test_a_clock_that_agrees_is_left_alone() -> None:
    clock = Clock([Point(0.0, 0.002, 0.003), Point(100.0, -0.002, 0.003)])
    assert not clock.differs and clock.corrected(7.3) == 7.3 and clock.error(50.0) == 0.005


def test_a_poor_comparison_near_a_better_one_is_left_out() -> None:
    good = [Point(0.0, 5.0, 1e-4), Point(20.0, 5.001, 1e-4)]
    clock = Clock([*good, Point(10.0, 5.02, 2e-2), Point(1.0, 5.0, 1e-4)])
    assert clock.corrected(10.0) == pytest.approx(15.0005, abs=1e-9)
    assert clock.corrected(30.0) == pytest.approx(35.0015) and clock.error(30.0) == pytest.approx(1.1e-3)
    assert Clock([*good, Point(10.0, 5.0007, 2e-4)]).corrected(10.0) == pytest.approx(15.0007)


def write(folder: Path, name: str, *records: dict[str, Any]) -> None:
    (folder / "events").mkdir(parents=True, exist_ok=True)
    with (folder / "events" / f"{name}.jsonl").open("a") as file:
        for record in records:
            rank = int(name[5:]) if name.startswith("rank-") else name
            file.write(json.dumps({"rank": rank, "generation": 0, **record}) + "\n")


def comparison(at: float, machine: int = 1, offset: float = -AHEAD, **more: Any) -> dict[str, Any]:
    return {"event": "clock", "time": at, "machine": machine, "launch": "a", "offset": offset, "error": 1e-4, **more}


def times(index: RecordIndex) -> dict[str, float]:
    index.update()
    return {record["text"]: record["time"] for _, record in index.find(Search(events=("note",)))}


def note(text: str, at: float) -> dict[str, Any]:
    return {"event": "note", "time": at, "text": text}


def test_times_in_the_index_are_of_one_clock(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write(first, "launcher", note("launcher", 100.5))
    write(first, "rank-0", comparison(100.0, machine=0, offset=2e-5), note("zero", 101.0))
    write(second, "rank-1", note("early", 105.75))
    index = RecordIndex(first, [second])
    assert times(index) == {"launcher": 100.5, "zero": 101.0, "early": 105.75}, "nothing is known of the clock"
    write(second, "rank-1", comparison(106.0), note("late", 116.0))
    assert times(index) == {"launcher": 100.5, "early": 100.75, "zero": 101.0, "late": 111.0}
    assert list(times(index)) == ["launcher", "early", "zero", "late"]
    write(second, "rank-1", comparison(126.0, offset=-AHEAD - 1e-3))
    assert times(index)["late"] == pytest.approx(110.9995), "interpolated"
    _, rows = index.query("SELECT time, json_extract(record, '$.time') FROM records WHERE rank = 1 AND time < 101")
    assert next(rows) == (pytest.approx(100.75, abs=1e-3), 105.75)
    rows.close()  # type: ignore[attr-defined]
    index.close()
    again = RecordIndex(first, [second])
    assert times(again)["late"] == pytest.approx(110.9995), "also from the file"
    again.close()


def test_a_rank_that_moves_to_another_machine(tmp_path: Path) -> None:
    write(tmp_path, "rank-1", comparison(105.0), note("there", 106.0), comparison(103.0, 2, -2.0), note("here", 104.0))
    no_comparison = {"event": "clock", "time": 1.0, "machine": 1, "launch": "b", "offset": 0.0, "error": -1.0}
    write(tmp_path, "rank-2", comparison(115.0, launch="b", offset=-9.0), no_comparison, note("resumed", 115.0))
    index = RecordIndex(tmp_path)
    assert times(index) == {"there": 101.0, "here": 102.0, "resumed": 106.0}
    index.close()


def test_the_ledger_orders_by_one_clock(tmp_path: Path) -> None:
    write(tmp_path, "rank-0", {"event": "resume", "time": 109.0, "step": 2}, comparison(110.0))
    write(tmp_path, "rank-0", {"event": "resume", "time": 112.0, "step": 3})
    write(tmp_path, "rank-1", {"event": "step", "time": 106.0, "step": 4, "samples": 8})
    assert read(tmp_path / "events").resumed == ((104.0, 2), (107.0, 3))


def test_no_receive_ends_before_its_send_begins() -> None:
    known = {"generation": 0, "step": 7, "microbatch": 3}
    send = {"event": "send", "rank": 0, "time": 2.5, "seconds": 0.5, "stage": 0, "peer": 1, **known}
    receive = {"event": "receive", "rank": 1, "time": 1.75, "seconds": 0.5, "stage": 1, "peer": 0, **known}
    workers = workers_of([send, receive])
    (sent,), (received,) = workers["rank 0"].tracks["send"], workers["rank 1"].tracks["receive"]
    assert sent.sends == received.receives and received.end == sent.begin == 2 * 10**9
    assert (received.begin, received.values["moved"]) == (1.25e9, 0.25)
    kept = workers_of([send, receive | {"time": 2.0}])["rank 1"].tracks["receive"][0]
    assert kept.end == 2 * 10**9 and "moved" not in kept.values
