"""What is started on Spark: a job for each agent, beside a coordinator on this machine."""

import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import StartError
from paceline.launchers.base import Request
from paceline.launchers.clusters.base import Options
from paceline.launchers.clusters.spark import Spark, _Jobs


def test_the_coordinator_is_here() -> None:
    request = Request(Path("train.py"), workers=2, nodes=(1, 3))
    here, *there = Spark().decide(request, Options(master="local[4]"), {}).agents
    assert here.command[here.command.index("-n") + 1] == "0"
    assert [agent.machine for agent in there] == ["machine 0", "machine 1", "machine 2"]
    words = there[0].command
    assert [words[words.index(name) + 1] for name in ("-n", "--nodes", "--elastic")] == ["2", "1:3", "2:6"]
    assert here.environment == there[0].environment


class Py4JJavaError(Exception):
    __module__ = "py4j.protocol"


class Gone:
    """SparkContext whose JVM has ended."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.cancelJobGroup = self.cancelled.append

    def getConf(self) -> Any:
        raise Py4JJavaError("An error occurred while calling o24.getConf.\n: java.lang.IllegalStateException: stopped")


def test_an_error_of_spark_is_told_while_slots_are_awaited() -> None:
    context, request = Gone(), Request(Path("train.py"), workers=2, nodes=(2, 2))
    with pytest.raises(StartError, match=r"Spark does not report its number of slots: java.*: stopped"):
        _Jobs(context, [], request).__enter__()


def test_ctrl_c_cancels_the_task_that_looks_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = _Jobs(context := Gone(), [], Request(Path("train.py"), workers=2, nodes=(2, 2)))

    def interrupted(self: Any, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "_await_slots", lambda: None)
    monkeypatch.setattr(jobs, "_run", lambda number, function: [])
    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        jobs.__enter__()
    assert context.cancelled == [jobs._group]
