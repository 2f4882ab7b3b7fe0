import shlex
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.report import alerts_of, resume_command, summary
from paceline.coordinator.failure.coordinator_report import CoordinatorReport, LostWorker
from paceline.coordinator.hang_detection import WorkerStatus
from paceline.coordinator.monitor import Alert, RunMonitor
from paceline.errors import EXIT_CODES
from paceline.launchers.base import Launch, Request
from paceline.launchers.runs import newest_checkpoint

PLAIN = Request(Path("train.py"), workers=3)
START = "paceline run -n 3 --name one --resume auto"


def launch_in(run: Path) -> Launch:
    (run / "output").mkdir(parents=True, exist_ok=True)
    return Launch(Path("train.py"), (), 3, run, {})


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({}, ""),
        ({"runs": Path("my runs")}, "--runs-dir 'my runs'"),
        ({"plan": Path("plan.toml")}, "--plan plan.toml"),
        ({"port": 29500}, "--port 29500"),
        ({"least": 2, "most": 8}, "--elastic 2:8"),
        ({"least": 3, "most": 3, "standby": 1}, "--standby 1"),
        ({"least": 2, "most": 8, "standby": 1}, "--elastic 2:8 --standby 1"),
        ({"nodes": (1, 2), "rendezvous": "a:29500"}, "--nodes 1:2 --rendezvous a:29500"),
        ({"patience_seconds": 5.0, "grace_seconds": 2.5}, "--patience 5 --grace 2.5"),
        ({"settings": {"batch": "4", "resume": "auto"}}, "--set batch=4"),
    ],
)
def test_the_command_that_resumes(changed: dict[str, Any], wanted: str) -> None:
    command = resume_command(launch_in_name("one"), replace(PLAIN, arguments=("an argument",), **changed))
    assert command == " ".join(word for word in (START, wanted, "train.py 'an argument'") if word)
    assert shlex.split(command)[-1] == "an argument"


def launch_in_name(name: str) -> Launch:
    return Launch(Path("train.py"), (), 3, Path("runs") / name, {})


def test_alerts_of_a_fixed_run_are_those_that_matter(tmp_path: Path) -> None:
    monitor = RunMonitor(lambda *_, **__: None)
    take = alerts_of(monitor, launch_in(tmp_path), elastic=False, quiet=False)
    monitor.alerts = deque([Alert("lost", "rank 1", (1,)), Alert("late", "still waiting: rank 0", (0,))])
    assert take() == ["still waiting: rank 0"]
    assert take() == []


def test_a_loss_is_told_as_the_launcher_saw_it(tmp_path: Path) -> None:
    monitor = RunMonitor(lambda *_, **__: None)
    monitor.started(1, 1)
    monitor.alerts.append(Alert("lost", "rank 1 ended", (1,)))
    take = alerts_of(monitor, launch_in(tmp_path), elastic=True, quiet=False)
    assert take() == []  # the launcher is about to see it
    monitor.exit_texts[1] = "rank 1 was killed by signal 9 (SIGKILL)"
    assert take() == ["lost: rank 1 was killed by signal 9 (SIGKILL)"]


def test_who_has_not_come_with_what_it_printed_last(tmp_path: Path) -> None:
    monitor, launch = RunMonitor(lambda *_, **__: None), launch_in(tmp_path)
    launch.output(1).write_text("loading\ndownloading\n")
    monitor.alerts.append(Alert("absent", "still waiting: rank 1", (1,)))
    (line,) = alerts_of(monitor, launch, elastic=False, quiet=True)()
    assert line == "still waiting: rank 1; the process is alive, its last output: 'downloading'"


def test_late_workers_are_reported_again_when_the_deadline_has_passed_again() -> None:
    monitor = RunMonitor(lambda *_, **__: None)
    statuses = [
        WorkerStatus(0, 5, "in the exchange", True, 9.0),
        WorkerStatus(1, 5, "in the script", False, 9.0, line="a.py:3"),
    ]
    monitor.report_late(statuses, [0, 1], statuses[1:], limit=60.0)
    monitor.report_late(statuses, [0, 1], statuses[1:], limit=60.0)
    assert len(monitor.alerts) == 1
    monitor.clear_late()
    monitor.report_late(statuses, [0, 1], statuses[1:], limit=0.0)
    monitor.report_late(statuses, [0, 1], statuses[1:], limit=0.0)
    assert [alert.text for alert in monitor.alerts] == [
        "still waiting: rank 0 has waited 9 s in the exchange at step 5; rank 1 has been in the script at step 5 "
        "for 9 s, a.py:3"
    ] * 3


def test_the_last_line_counts_the_lost() -> None:
    assert summary(CoordinatorReport()) == ""
    lost = tuple(LostWorker(number, number, 0.0) for number in (1, 2))
    assert (
        summary(CoordinatorReport(ranks={0: 0, 3: 1}, lost=lost, joined=1))
        == "2 workers were lost on the way; 1 was replaced"
    )


def test_a_checkpoint_elsewhere_is_found_in_the_records(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    lines = ['{"time": 1.5, "event": "checkpoint", "step": 4, "path": "s3://a/step-000004"}', '{"event": "step"}', "{"]
    (tmp_path / "events" / "rank-0.jsonl").write_text("\n".join(lines))
    assert newest_checkpoint(tmp_path) == ("s3://a/step-000004", 4, 1.5)
    assert newest_checkpoint(tmp_path / "nowhere") is None


def test_the_exit_codes_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    assert all(f"\n| {code} |" in page for code in EXIT_CODES)
