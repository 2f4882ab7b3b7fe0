"""What is started on Spark: a barrier stage, or a job for each agent of an elastic run."""

from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.launchers.base import Request
from paceline.launchers.clusters.base import Options
from paceline.launchers.clusters.spark.place import Spark

OPTIONS = Options(master="local[4]")


def test_an_elastic_run_has_its_coordinator_here() -> None:
    request = Request(Path("train.py"), workers=2, nodes=(1, 3), least=2, most=6)
    here, *there = Spark().decide(request, OPTIONS, {}).agents
    assert here.command[here.command.index("-n") + 1] == "0"
    assert [agent.machine for agent in there] == ["task 0", "task 1", "task 2"]
    words = there[0].command
    assert [words[words.index(name) + 1] for name in ("-n", "--nodes", "--elastic")] == ["2", "1:3", "2:6"]
    assert here.environment == there[0].environment


def test_a_barrier_stage_has_a_fixed_number_of_tasks() -> None:
    with pytest.raises(ConfigError, match="give one number, as in --nodes 3, or --elastic, too"):
        Spark().decide(Request(Path("train.py"), nodes=(1, 3)), OPTIONS, {})
    assert len(Spark().decide(Request(Path("train.py"), nodes=(3, 3)), OPTIONS, {}).agents) == 3
