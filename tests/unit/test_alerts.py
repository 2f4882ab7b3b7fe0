"""Alerts of a run: which records cause them, and how a command or a URL receives them."""

import contextlib
import json
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cli.display.alerts import Watch, check, check_command, deliver
from paceline.cli.display.conditions import FORMS, Conditions, parse
from paceline.cli.report import resume_command
from paceline.errors import ConfigError
from paceline.events import EventLog
from paceline.launchers.base import Request
from paceline.launchers.clusters.base import given_options

Record = dict[str, Any]


def step(number: int, **fields: Any) -> Record:
    return {"event": "step", "step": number, "loss": 1.0, "seconds": 0.1, **fields}


def texts(condition: str, *records: Record) -> list[str]:
    """The alerts of records, each of which is read at its ``at``, by default when the run begins."""
    conditions = Conditions([parse(condition)], begin=0.0)
    return [alert.text for record in records for alert in conditions.take(record, record.get("at", 0.0))]


def tick(at: float) -> Record:
    return {"event": "tick", "at": at}


def test_a_run_that_stalls_is_told_once_until_it_goes_on() -> None:
    loop = {"event": "batches", "position": 0, "steps": 3}
    first = step(0, at=70.0), tick(129.0), tick(131.0), tick(200.0)
    rest = step(1, at=201.0), tick(262.0), step(2, at=263.0), tick(999.0)
    assert texts("stalled > 1m", tick(59.0), tick(61.0), tick(62.0), loop, *first, *rest) == [
        "no step has ended for 61 s; the run has made none",
        "no step has ended for 61 s; the last was step 0",
        "no step has ended for 61 s; the last was step 1",
    ]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite(bad: float) -> None:
    steps = [step(number, loss=bad if number in (3, 5, 20) else 1.0) for number in range(30)]
    told = [f"the loss of step {number} is {bad}" for number in (3, 20)]  # that of step 5 has the same cause
    assert texts("loss is nan", *steps) == told


def test_a_loss_and_a_step_above_a_limit() -> None:
    steps = [step(0), step(1, loss=10.5), step(2, seconds=0.3), step(3, loss=None)]
    assert texts("loss > 10", *steps) == ["the loss of step 1 is 10.5"]
    assert texts("step > 250 ms", *steps) == ["step 2 took 0.3 s"]


def test_a_step_is_compared_with_the_median_of_those_before() -> None:
    early, late = step(5, seconds=1.0), step(11, seconds=0.31)
    steps = [*(step(number) for number in range(5)), early, *(step(number) for number in range(6, 11)), late]
    assert texts("step > 3x", *steps) == ["step 11 took 0.31 s, and the median of those before is 0.1 s"]


def test_the_median_of_steps_above_a_limit() -> None:
    fast, slow = [step(number) for number in range(12)], [step(12 + number, seconds=0.3) for number in range(14)]
    assert texts("steps > 110ms", *fast) == []
    assert texts("steps > 90 ms", *fast) == ["the median of the steps before step 10 is 0.1 s"]  # of ten durations
    assert texts("steps > 110ms", *fast, *slow) == ["the median of the steps before step 24 is 0.2 s"]


def test_checkpoints() -> None:
    failed = {"event": "checkpoint-failed", "step": 7, "reason": "No space left on device"}
    saved = {"event": "checkpoint", "step": 9}
    told = "the checkpoint of step 7 could not be written: No space left on device"
    assert texts("checkpoint failed", failed, failed, saved, failed) == [told, told]
    assert texts("checkpoint > 30m", tick(1799.0), saved | {"at": 1800.0}, tick(3599.0), tick(3601.0)) == [
        "no checkpoint has been written for 1801 s"
    ]


def test_each_lost_worker_and_the_end() -> None:
    lost = [{"event": "lost", "worker": number, "reason": "killed"} for number in (1, 3)]
    assert texts("worker lost", *lost) == ["worker 1 is lost: killed", "worker 3 is lost: killed"]
    good, bad = ({"event": "ended", "code": code} for code in (0, 5))
    assert texts("run ended", good) == ["the run has ended with exit code 0"]
    assert texts("run failed", good) == [] and texts("run failed", bad) == ["the run has ended with exit code 5"]


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_that_the_message_names(form: str) -> None:
    assert parse(form.upper().replace(" ", "  ")).text == form


@pytest.mark.parametrize(
    "text",
    [
        "",
        "step outside 3s to 2s",
        "stalled",
        "stalled > 60",
        "stalled > 0s",
        "stalled < 60s",
        "loss > 3s",
        "loss > x",
        "step > 3",
        "x" * 999,
    ],
)
def test_what_is_no_condition(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a condition"):
        check([text], None)


@pytest.mark.parametrize("notify", ["", "  ", "'open", "https://", "http://[x"])
def test_what_is_no_notifier(notify: str) -> None:
    with pytest.raises(ConfigError, match="give a command"):
        check(["worker lost"], notify)


def test_a_notifier_without_conditions_and_one_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"'https://host/\*\*\*' has no effect without a condition"):
        check([], "https://host/f00")
    with pytest.raises(ConfigError, match=r"no executable '\./missing\.sh'"):
        check_command("./missing.sh --all")
    check_command("sh -c true")


def test_an_agent_gets_the_alerts() -> None:
    request = Request(Path("train.py"), alerts=("worker lost", "stalled > 60s"), notify="./tell.sh --all")
    wanted = ["--notify", "./tell.sh --all", "--alert", "worker lost", "--alert", "stalled > 60s"]
    assert given_options(request)[2:] == wanted


def test_the_command_that_resumes_a_run_hides_the_path_of_a_url() -> None:
    request = Request(Path("train.py"), alerts=("run failed",), notify="https://me:f00@host/f00")
    launch: Any = SimpleNamespace(run=Path("runs/first"))
    assert "--notify 'https://host/***' --alert 'run failed'" in resume_command(launch, request)


ALERT = {"run": "first", "condition": "loss is nan", "text": "the loss of step 3 is nan", "step": 3, "time": 1.5}


def test_a_command_gets_the_alert_as_json_and_in_variables(tmp_path: Path) -> None:
    tell = (
        f"cat > {tmp_path}/json; echo $PACELINE_ALERT_RUN, $PACELINE_ALERT_STEP, $PACELINE_ALERT_TEXT > {tmp_path}/text"
    )
    assert deliver(f"sh -c '{tell}'", ALERT, 60.0) == ""
    assert json.loads((tmp_path / "json").read_text()) == ALERT
    assert (tmp_path / "text").read_text() == "first, 3, the loss of step 3 is nan\n"


def test_commands_that_fail() -> None:
    assert deliver("sh -c 'echo no server >&2; exit 3'", ALERT, 60.0) == (
        "it ended with exit code 3 and printed 'no server'"
    )
    assert "No such file" in deliver("./missing.sh", ALERT, 60.0)


def test_a_command_that_hangs_is_killed_with_its_processes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "open")
    held = os.open(tmp_path / "open", os.O_RDONLY | os.O_NONBLOCK)
    hangs = f"sh -c '(exec sleep 999) > {tmp_path}/open'"
    assert deliver(hangs, ALERT, 0.5) == "it had not ended after 0 s"
    assert select.select([held], [], [], 60.0)[0] and os.read(held, 1) == b""  # nobody has it open
    os.close(held)


@pytest.fixture
def server() -> Iterator[tuple[str, list[bytes]]]:
    """A server that accepts what is posted to /good, and what it got."""
    got: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204 if self.path == "/good" else 500)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{listening.server_address[1]}", got
        listening.shutdown()
        thread.join()


def test_a_url_gets_a_post(server: tuple[str, list[bytes]]) -> None:
    url, got = server
    assert deliver(f"{url}/good", ALERT, 60.0) == ""
    assert [json.loads(one) for one in got] == [ALERT]
    assert "500" in deliver(f"{url}/bad", ALERT, 60.0)


def test_a_url_whose_answer_does_not_end() -> None:
    closed = threading.Event()

    def trickle() -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            while not closed.wait(0.01):
                connection.send(b"x")  # so no wait for a byte takes long

    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread = threading.Thread(target=trickle)
        thread.start()
        assert deliver(url, ALERT, 0.5) == "it had not answered after 0 s"
        closed.set()
        thread.join()
    assert "refused" in deliver(url, ALERT, 60.0)


@pytest.fixture
def told(tmp_path: Path) -> Callable[[str | None, list[str], list[Record]], list[str]]:
    """The lines about a run with these records of rank 0, which ends with code 5 at once."""

    def run(notify: str | None, alerts: list[str], records: list[Record]) -> list[str]:
        lines: list[str] = []
        log = EventLog(tmp_path / "events", "launcher")
        with Watch(tmp_path, alerts, notify, log, lines.append) as watch:
            (tmp_path / "events" / "rank-0.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
            log.mark("lost", worker=1, reason="killed")
            watch.end(5)
        log.close()
        return lines

    return run


def test_the_last_records_and_the_end_of_a_run_are_told(told: Callable[..., list[str]], tmp_path: Path) -> None:
    assert told(None, ["loss is nan", "run failed", "worker lost"], [step(3, loss=float("nan"))]) == [
        "alert: loss is nan: the loss of step 3 is nan",
        "alert: worker lost: worker 1 is lost: killed",
        "alert: run failed: the run has ended with exit code 5",
    ]
    records = [json.loads(line) for line in (tmp_path / "events" / "launcher.jsonl").read_text().splitlines()]
    assert [one["condition"] for one in records if one["event"] == "alert"] == [
        "loss is nan",
        "worker lost",
        "run failed",
    ]


def test_a_notifier_that_fails_is_a_warning(told: Callable[..., list[str]]) -> None:
    assert told("sh -c 'exit 3'", ["run failed"], []) == [
        "alert: run failed: the run has ended with exit code 5",
        "warning: the alert was not delivered to sh -c 'exit 3': it ended with exit code 3",
    ]


def test_notifiers_that_hang_do_not_add_up(told: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cli.display.alerts._SECONDS", 0.2)
    lines = told("sleep 999", ["worker lost", "run failed", "run ended"], [])
    assert [line.rpartition(": ")[2] for line in lines if line.startswith("warning")] == [
        "it had not ended after 0 s",
        "the alerts before it took 0.2 s",
        "the alerts before it took 0.2 s",
    ]
