"""From events to trackers: order, repeats, slow and failing trackers, what session.log takes."""

from __future__ import annotations

import csv
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import paceline
from paceline import config
from paceline.adapters.trackers import media, png, registry, sender, tracking
from paceline.adapters.trackers.adapters.tensorboard import TensorBoardTracker
from paceline.adapters.trackers.base import TrackedRun, Tracker, Values
from paceline.adapters.trackers.feed import Feed
from paceline.adapters.trackers.values import recorded
from paceline.errors import ConfigError, InputError
from paceline.events import EventLog
from paceline.settings import TRACKERS


def run_in(folder: Path, position: int = 0) -> TrackedRun:
    return TrackedRun("0123456789abcdef", "tests", "one", folder, folder / "one", position, {"batch": 8}, {}, {})


class Kept(Tracker):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[Values] = []
        self.closed = threading.Event()

    def write(self, values: Sequence[Values]) -> None:
        self.got += values

    def close(self) -> None:
        self.closed.set()


Opened = Callable[[TrackedRun], Tracker]


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> Callable[[Opened], None]:
    """What the next trackers are."""

    def become(opened: Opened) -> None:
        monkeypatch.setattr(sender, "open_tracker", lambda name, run: opened(run))

    return become


@pytest.fixture
def feeds(tmp_path: Path) -> Iterator[Callable[..., Feed]]:
    """Feeds that are closed in the end."""
    made: list[Feed] = []

    def make(name: str = "mlflow") -> Feed:
        made.append(Feed((name,), None))
        return made[-1]

    yield make
    for one in made:
        one.close()


def step(number: int, **more: Any) -> dict[str, Any]:
    record = {"event": "step", "time": 1.0, "rank": 0, "generation": 0, "step": number, "loss": number / 2}
    return {**record, "learning_rate": 0.1, "gradient_norm": 1.0, "samples_per_second": 9.0, **more}


def test_steps_that_come_again_are_left_out(tmp_path: Path, opens: Any, feeds: Any) -> None:
    kept = Kept()
    opens(lambda run: kept)
    feed = feeds()
    feed.begin(run_in(tmp_path), True)
    for number in (0, 1, 2, 1, 2, 3):
        feed.offer(step(number, metrics={"accuracy": 0.5}))
    feed.offer({"event": "evaluation", "time": 1.0, "step": 3, "metrics": {"evaluation.error": 0.25}})
    feed.offer({"event": "exchange", "time": 1.0, "bytes": 3})
    feed.close()
    assert [one.step for one in kept.got] == [0, 1, 2, 3, 3]
    assert set(kept.got[0].scalars) == {"loss", "learning_rate", "gradient_norm", "samples_per_second", "accuracy"}
    assert kept.got[-1].scalars == {"evaluation.error": 0.25}
    assert kept.closed.is_set()


def test_the_next_rank_0_goes_on_where_the_one_before_was(tmp_path: Path, opens: Any, feeds: Any) -> None:
    first, second = Kept(), Kept()
    opens(lambda run: first)
    before, after = feeds(), feeds()
    before.begin(run_in(tmp_path), True)
    after.begin(run_in(tmp_path), False)
    for number in range(4):
        before.offer(step(number))
        after.offer(step(number))
    before.close()
    opens(lambda run: second)
    after.offer(step(4))  # the one before was lost before it sent this
    after.offer({"event": "recovered", "time": 1.0, "rank": 0, "step": 5})
    after.offer(step(5))
    after.close()
    assert [one.step for one in first.got + second.got] == list(range(6))


def test_who_was_dropped_writes_no_more(tmp_path: Path, opens: Any, feeds: Any) -> None:
    entered, go_on, kept = threading.Event(), threading.Event(), Kept()

    class Slow(Kept):
        def write(self, values: Sequence[Values]) -> None:
            super().write(values)
            entered.set()
            assert go_on.wait(30)

    slow = Slow()
    opens(lambda run: slow)
    before, after = feeds(), feeds()
    before.begin(run_in(tmp_path), True)
    before.offer(step(0))
    assert entered.wait(30)
    opens(lambda run: kept)
    after.begin(run_in(tmp_path), True)
    after.offer(step(1))
    after.close()
    before.offer(step(1))
    go_on.set()
    before.close()
    assert [one.step for one in slow.got] == [0]
    assert [one.step for one in kept.got] == [1]


def test_a_tracker_that_fails_is_said_once(
    tmp_path: Path, opens: Any, feeds: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(run: TrackedRun) -> Tracker:
        raise ConnectionError("no network")

    opens(fail)
    feed = feeds()
    with caplog.at_level(logging.WARNING, "paceline"):
        feed.begin(run_in(tmp_path), True)
        for number in range(100):
            feed.offer(step(number))
        feed.close()
    assert [one.message for one in caplog.records] == [
        "tracker mlflow failed and is off from now on: ConnectionError: no network"
    ]


def test_a_tracker_that_blocks_keeps_nobody(
    tmp_path: Path, opens: Any, feeds: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue is bounded, and the end waits for it no longer than asked for."""
    monkeypatch.setattr(sender, "_MOST_WAITING", 3)
    go_on = threading.Event()

    def block(run: TrackedRun) -> Tracker:
        assert go_on.wait(30)
        return Kept()

    opens(block)
    monkeypatch.setattr("paceline.adapters.trackers.feed._CLOSING_SECONDS", 0.1)
    feed = feeds()
    with caplog.at_level(logging.WARNING, "paceline"):
        feed.begin(run_in(tmp_path), True)
        for number in range(10):
            feed.offer(step(number))
        feed.close()
    go_on.set()
    assert [one.message.partition(":")[0] for one in caplog.records] == [
        "tracker mlflow is behind by 3 records",
        "tracker mlflow did not finish before the end of the script",
    ]


def test_csv_goes_back_to_the_position_of_a_resume(tmp_path: Path, feeds: Any) -> None:
    first = feeds("csv")
    first.begin(run_in(tmp_path), True)
    for number in range(6):
        first.offer(step(number))
    first.close()
    with (tmp_path / "one" / "metrics.csv").open("a") as file:
        file.write("6,loss,half a li")  # of a process that was killed
    again = feeds("csv")
    again.begin(run_in(tmp_path, position=4), True)
    for number in range(4, 8):
        again.offer(step(number, loss=-1.0))
    again.close()
    rows = list(csv.DictReader((tmp_path / "one" / "metrics.csv").read_text().splitlines()))
    losses = [(int(row["step"]), float(row["value"])) for row in rows if row["name"] == "loss"]
    assert losses == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5), (4, -1.0), (5, -1.0), (6, -1.0), (7, -1.0)]


def test_csv_goes_back_to_where_the_workers_recovered(tmp_path: Path, feeds: Any) -> None:
    before, after = feeds("csv"), feeds("csv")
    before.begin(run_in(tmp_path), True)
    for number in range(6):
        before.offer(step(number))
    before.close()
    after.begin(run_in(tmp_path), False)
    for number in (2, 3):  # it has joined late
        after.offer(step(number))
    after.offer({"event": "recovered", "time": 1.0, "rank": 0, "step": 4})
    for number in range(4, 7):
        after.offer(step(number, loss=-1.0))
    after.close()
    rows = list(csv.DictReader((tmp_path / "one" / "metrics.csv").read_text().splitlines()))
    losses = [(int(row["step"]), float(row["value"])) for row in rows if row["name"] == "loss"]
    assert losses == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5), (4, -1.0), (5, -1.0), (6, -1.0)]


def test_what_was_killed_in_its_first_write_is_written_once(
    tmp_path: Path, feeds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, again = feeds("tensorboard"), feeds("tensorboard")
    write = TensorBoardTracker.write

    def die(tracker: TensorBoardTracker, values: Sequence[Values]) -> None:
        write(tracker, values)
        raise ConnectionError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(TensorBoardTracker, "write", die)
        killed.begin(run_in(tmp_path), True)
        killed.offer(step(0))
        killed.close()
    again.begin(run_in(tmp_path, position=1), True)
    for number in range(2):
        again.offer(step(number))
    again.close()
    read = EventAccumulator(str(tmp_path / "one" / "tensorboard")).Reload()
    assert [one.step for one in read.Scalars("loss")] == [0, 1]


def test_values_of_killed_workers_are_in_the_event_files(tmp_path: Path) -> None:
    lines = [
        step(7, loss=9.0),
        {"event": "start", "run": "of another session"},
        step(0, loss=8.0),
        {"event": "start", "run": "this"},
        {"event": "exchange", "bytes": 4},
        *map(step, range(5)),
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "rank-1.jsonl").write_text(text + '{"event": "st')
    (tmp_path / "launcher.jsonl").write_text(json.dumps(step(1)) + "\n")
    assert [(one.step, one.scalars["loss"]) for one in recorded(tmp_path, "this", 3)] == [(0, 0.0), (1, 0.5), (2, 1.0)]


def test_what_is_logged_is_sorted_out() -> None:
    logged = media.sort_out(
        {
            "number": 3,
            "numpy": np.float32(0.5),
            "tensor": torch.tensor([2.0], dtype=torch.bfloat16, requires_grad=True),
            "text": "two words",
            "grey": torch.tensor([[0.0, 0.5], [1.0, 2.0]]),
            "colors": np.zeros((3, 4, 5), np.uint8),
        }
    )
    assert logged.scalars == {"number": 3.0, "numpy": 0.5, "tensor": 2.0}
    assert logged.texts == {"text": "two words"}
    assert logged.images["grey"].tolist() == [[[0], [128]], [[255], [255]]]
    assert logged.images["colors"].shape == (4, 5, 3)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1], "takes a mapping of names to values, not a list"),
        ({"": 1}, "'' is not a valid name"),
        ({"loss": 1.0}, "'loss' is recorded in each step"),
        ({"a": object()}, "'a' is a object; give a number"),
        ({"a": torch.zeros(7, 4, 4)}, r"'a' has the shape \[7, 4, 4\]"),
    ],
    ids=["list", "no name", "taken", "object", "seven channels"],
)
def test_what_cannot_be_logged(values: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        media.sort_out(values)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_png_files_are_read_by_others(channels: int) -> None:
    image = pytest.importorskip("PIL.Image")
    import io

    pixels = np.arange(5 * 6 * channels, dtype=np.uint8).reshape(5, 6, channels)
    data = png.encode(pixels)
    assert png.size_of(data) == (6, 5, channels)
    assert np.array_equal(np.asarray(image.open(io.BytesIO(data))).reshape(pixels.shape), pixels)


def test_names_of_trackers() -> None:
    assert config.resolve({"trackers": "csv, tensorboard,csv"}).settings.trackers == ("csv", "tensorboard")
    with pytest.raises(ConfigError, match="there is no tracker 'tensorbord'; the trackers are comet, csv"):
        config.parse_command_line(["trackers=tensorbord"])
    with pytest.raises(ConfigError, match="there is no tracker '1'"):
        config.resolve({"trackers": [1]})
    with pytest.raises(ConfigError, match="trackers"):
        config.resolve({"trackers": [{"csv": True}]})
    assert set(registry._PACKAGES) == set(TRACKERS)


def test_a_missing_library_is_named_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs comet_ml, which is not installed: pip install 'paceline\[comet\]'"):
        paceline.start(
            model=torch.nn.Linear(1, 1),
            optimizer=torch.optim.SGD,
            loss=torch.nn.functional.mse_loss,
            data=[(torch.zeros(1), torch.zeros(1))],
            batch=1,
            trackers="comet",
        )


def test_secrets_are_masked(tmp_path: Path) -> None:
    given = {"directory": "s3://me:hunter2@bucket/data"}
    found = config.resolve({"checkpoint": given, "trackers": "csv", "tracking": {"directory": tmp_path}})
    events = EventLog(None, 0)
    tracking.Tracking(found.settings, found.sources, events, None, 1).begin("0123456789abcdef", 0, {})
    events.close()
    (about,) = tmp_path.glob("*/run.json")
    assert json.loads(about.read_text())["settings"]["checkpoint.directory"] == "s3://***@bucket/data"
    assert "hunter2" not in about.read_text()


def test_values_that_nothing_records_are_noted_once(caplog: pytest.LogCaptureFixture) -> None:
    settings = config.resolve({"batch": 8})
    mine = tracking.Tracking(settings.settings, settings.sources, EventLog(None, 0), None, 1)
    with caplog.at_level(logging.WARNING, "paceline"):
        mine.log({"a": 1}, 0)
        mine.log({"a": 2}, 1)
    assert [one.message for one in caplog.records] == [
        "nothing records the values of session.log: set trackers, or start with paceline run"
    ]


def test_images_and_texts_are_in_the_event_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other worker has them, if this one is killed before the thread would write."""
    monkeypatch.setattr("paceline.events._FLUSH_SECONDS", 60.0)
    settings = config.resolve({"batch": 8})
    events = EventLog(tmp_path / "events", 0)
    tracking.Tracking(settings.settings, settings.sources, events, tmp_path, 1).log({"said": "epoch 1", "a": 1.0}, 3)
    (record,) = map(json.loads, (tmp_path / "events" / "rank-0.jsonl").read_text().splitlines())
    events.close()
    assert (record["step"], record["metrics"]) == (3, {"a": 1.0})
    assert Path(record["texts"]["said"]).read_text() == "epoch 1"


def test_numbers_of_every_rank_are_in_its_event_file(tmp_path: Path) -> None:
    """For the next rank 0, if this one is lost before it has recorded them."""
    settings = config.resolve({"batch": 8})
    events = EventLog(tmp_path / "events", 1)
    mine = tracking.Tracking(settings.settings, settings.sources, events, tmp_path, 1)
    mine.log({"said": "epoch 1", "a": 1.0}, 3)
    mine.log({"said": "epoch 2"}, 4)
    events.close()
    (record,) = map(json.loads, (tmp_path / "events" / "rank-1.jsonl").read_text().splitlines())
    assert (record["event"], record["step"], record["metrics"]) == ("metrics", 3, {"a": 1.0})


def test_the_log_and_its_listener(tmp_path: Path, opens: Any, feeds: Any) -> None:
    """Also without a folder for the event files; the log closes what listens to it."""
    kept = Kept()
    opens(lambda run: kept)
    log, feed = EventLog(None, 0), feeds()
    log.attach(feed)
    feed.begin(run_in(tmp_path), True)
    log.mark("metrics", step=3, metrics={"a": 1.0}, texts={"b": "b.txt"})
    log.close()
    (one,) = kept.got
    assert (one.step, one.scalars, one.texts) == (3, {"a": 1.0}, {"b": "b.txt"})
    assert abs(one.time - time.time()) < 3600
