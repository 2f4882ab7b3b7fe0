"""What is started on Spark: a job for each agent, beside a coordinator on this machine."""

from pathlib import Path

from paceline.launchers.base import Request
from paceline.launchers.clusters.base import Options
from paceline.launchers.clusters.spark import Spark


def test_the_coordinator_is_here() -> None:
    request = Request(Path("train.py"), workers=2, nodes=(1, 3))
    here, *there = Spark().decide(request, Options(master="local[4]"), {}).agents
    assert here.command[here.command.index("-n") + 1] == "0"
    assert [agent.machine for agent in there] == ["machine 0", "machine 1", "machine 2"]
    words = there[0].command
    assert [words[words.index(name) + 1] for name in ("-n", "--nodes", "--elastic")] == ["2", "1:3", "2:6"]
    assert here.environment == there[0].environment
