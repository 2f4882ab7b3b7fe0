"""What is decided for Slurm, as data."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.environments import env
from paceline.errors import ConfigError, StartError
from paceline.launchers.base import Request
from paceline.launchers.clusters.base import Options
from paceline.launchers.clusters.slurm import place as slurm
from paceline.launchers.clusters.slurm.job import batch_script, fields_of, seconds_of
from paceline.launchers.clusters.slurm.place import Slurm, steps

REQUEST = Request(Path("train.py"), ("--rate", "0.1"), workers=4, nodes=(2, 2))
RUN = Path("/home/me/50% done/one")
JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]


def test_batch_script(tmp_path: Path) -> None:
    options = Options(time="1-2:00", partition="big", account="mine", gpus=4)
    script = batch_script(replace(REQUEST, grace_seconds=40, settings={"exact": "true"}), options, RUN)
    assert directives(script) == [
        "job-name=train",
        "nodes=2",
        "ntasks-per-node=1",
        "cpus-per-task=4",
        "gpus-per-node=4",
        "time=1-2:00",
        "partition=big",
        "account=mine",
        "output='/home/me/50%% done/one/job-%j.out'",
        "error='/home/me/50%% done/one/job-%j.err'",
        "open-mode=append",
        "signal=B:USR1@75",
        "requeue",
    ]
    (command,) = (line for line in script.splitlines() if " -m paceline run " in line)
    said = "run --on slurm -n 4 --name one --resume auto --nodes 2 --grace 40 --set exact=true train.py --rate 0.1 &"
    assert command.endswith(said)
    (tmp_path / "job.sh").write_text(script)
    subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=True)


def test_the_page_shows_the_script() -> None:
    page = (Path(__file__).parents[2] / "docs" / "places" / "slurm.md").read_text()
    request = replace(REQUEST, arguments=())
    script = batch_script(request, Options(time="4:00:00", gpus=4), Path("/home/me/runs/first"))
    assert script.replace(sys.executable, "python") in page


def test_survivors_go_on_only_where_they_may() -> None:
    assert "no-kill" not in directives(batch_script(REQUEST, Options(), RUN))
    several = directives(batch_script(replace(REQUEST, nodes=(1, 3)), Options(), RUN))
    assert "nodes=1-3" in several and "no-kill" in several
    assert "no-kill" in directives(batch_script(replace(REQUEST, least=4, most=8), Options(), RUN))


def test_a_job_that_begins_at_a_checkpoint_does_not_come_back_to_it() -> None:
    script = batch_script(replace(REQUEST, settings={"resume": "old/step-3"}), Options(), RUN)
    assert "no-requeue" in directives(script) and "scontrol" not in script


def test_no_signal_in_a_job_that_is_over_before_it() -> None:
    """Slurm would send it at the start, and the job would come back for ever."""
    assert not any("signal" in line for line in directives(batch_script(REQUEST, Options(time="2"), RUN)))
    assert any("signal" in line for line in directives(batch_script(REQUEST, Options(time="3"), RUN)))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("2:00:01", 7201), ("1-2", 93600), ("1-2:03", 93780), ("1-2:03:04", 93784)],
)
def test_time(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "never", "1h", "1:2:3:4", "1-", "-5", "1-2:3:4:5", "1.5"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ConfigError, match="--time"):
        batch_script(REQUEST, Options(time=text), RUN)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, True),
        ({"SLURM_STEP_ID": "4294967291"}, True),
        ({"SLURM_STEP_ID": "0"}, False),
        ({"SLURM_JOB_NUM_NODES": "1"}, False),
    ],
)
def test_inside_an_allocation(changed: dict[str, str], found: bool) -> None:
    assert bool(Slurm.found({**JOB, **changed})) == found
    assert Slurm.found({}) is None


def test_an_srun_for_each_node() -> None:
    agents = steps(replace(REQUEST, nodes=(1, 3)), ["n1", "n2"], "10.0.0.1:20000")
    assert [agent.machine for agent in agents] == ["n1", "n2"]
    words = list(agents[1].command)
    assert words[0] == "srun" and "--nodelist=n2" in words
    assert words[words.index("--nodes") + 1] == "1:2" and words[words.index("--elastic") + 1] == "4:8"
    assert len(agents[0].environment[env.SECRET]) == 64 and agents[0].environment == agents[1].environment
    assert len(steps(replace(REQUEST, nodes=(1, 1)), ["n1", "n2"], "10.0.0.1:20000")) == 1
    with pytest.raises(ConfigError, match="the allocation has 1: n1"):
        steps(REQUEST, ["n1"], "10.0.0.1:20000")


def test_options_of_a_job_in_a_job() -> None:
    with pytest.raises(ConfigError, match="--time is for a job that is submitted, and this process is in job 12"):
        Slurm().decide(REQUEST, Options(time="1:00"), JOB)


@pytest.mark.parametrize(("environment", "program"), [({}, "sbatch"), (JOB, "srun")])
def test_no_slurm(environment: dict[str, str], program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartError, match=f"there is no {program} here"):
        Slurm().decide(replace(REQUEST, runs=tmp_path), Options(), environment)


def test_runs_in_one_job_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = set()
    for process in range(1000, 1100):
        monkeypatch.setattr(slurm.os, "getpid", lambda process=process: process)
        ports.add(slurm._port(12))
    assert len(ports) == 100 and min(ports) >= 10_000 and max(ports) < 30_000


def test_fields() -> None:
    assert fields_of("JobId=3 JobState=FAILED ExitCode=75:0 Command=/x NodeAddr=h1 JobState=no")["JobState"] == "FAILED"
