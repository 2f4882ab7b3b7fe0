"""Faults to order: each kind happens, at each point of a step, to the worker that is named, and once."""

import errno
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.system import fault_points
from paceline.system.fault_points import Point
from paceline.testing import faults, ordered_faults
from paceline.testing.faults import Plan
from paceline.testing.ordered_faults import OrderedFaults
from paceline.testing.ranks import Ended, Kill

STEPS = 8
SCRIPT = """
import os
import paceline
from subjects import CASES, tell

given = CASES["batch norm, dropout, short batch"]()
session = paceline.start(
    **given,
    exact=True,
    workers_per_loader=int(os.environ.get("LOADERS", 0)),
    checkpoint={"directory": os.environ["SAVED"], "every": 4, "background": False},
    resume="auto",
    timeout_seconds=float(os.environ.get("TIMEOUT", 60)),
)
try:
    for batch in session.batches(steps=STEPS):
        session.step(batch)
        print("step", batch.step, flush=True)
        if session.position == 3:
            session.evaluate(given["data"])
            print("evaluated", flush=True)
except paceline.WorkerLost:
    print("lost", flush=True)
    raise
tell(fingerprint=session.fingerprint())
""".replace("STEPS", str(STEPS))

Run = Callable[..., list[Ended]]


@pytest.fixture
def crew(ranks: Run, tmp_path: Path) -> Run:
    """Train with faults: on 3 workers, unless said otherwise, that save into a folder of the test."""

    def start(plan: Plan, workers: int = 3, **more: Any) -> list[Ended]:
        environment = plan.environment(tmp_path / "marks") | {"SAVED": str(tmp_path / "saved")}
        environment.update(more.pop("environment", {}))
        return ranks(SCRIPT, workers, tmp_path, environment=environment, **more)

    return start


@pytest.fixture(scope="module")
def fingerprint(ranks: Run, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What comes out when nothing happens."""
    directory = tmp_path_factory.mktemp("undisturbed")
    (one,) = ranks(SCRIPT, 1, directory, environment={"SAVED": str(directory / "saved")})
    assert one.code == 0, one.err
    return fingerprint_of(one)


def fingerprint_of(one: Ended) -> str:
    return str(json.loads(one.out.splitlines()[-1])["fingerprint"])


def steps_of(one: Ended) -> list[int]:
    return [int(line.split()[1]) for line in one.out.splitlines() if line.startswith("step")]


# what the victim has printed when it is killed at its step 4, or when 4 (a save) or 3 (evaluate) steps are done
PRINTED = {
    "before forward": [0, 1, 2, 3],
    "in the loader": [0, 1, 2, 3],
    "inside the collective": [0, 1, 2, 3],
    "between reduction and update": [0, 1, 2, 3],
    "after update": [0, 1, 2, 3],
    "inside a save": [0, 1, 2],
    "in evaluate": [0, 1, 2],
}
STEP = dict.fromkeys(PRINTED, 4) | {"in evaluate": 3}
VICTIM = dict.fromkeys(PRINTED, 1) | {"inside a save": 0}  # rank 0 writes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("point", PRINTED)
def test_a_kill_at_each_point(crew: Run, tmp_path: Path, fingerprint: str, point: Point) -> None:
    victim = VICTIM[point]
    plan = faults.kill(rank=victim, step=STEP[point], point=point)
    ended = crew(plan)
    assert ended[victim].signal == "SIGKILL"
    assert steps_of(ended[victim]) == PRINTED[point]
    assert ended[victim].out.count("evaluated") == (point != "in evaluate")
    for one in ended:
        if one.rank != victim:
            assert one.code == 5, one.err
            assert "WorkerLost" in one.err
    (told,) = faults.happened(tmp_path / "marks").values()
    assert (told["rank"], told["step"]) == (victim, STEP[point])
    saved = sorted(path.name for path in (tmp_path / "saved").glob("step-*"))
    assert saved == (["step-000004"] if point not in ("inside a save", "in evaluate") else [])
    again = crew(plan)  # the fault has happened: the same plan does not stop the run that goes on
    assert [one.code for one in again] == [0, 0, 0], again[0].err
    assert {fingerprint_of(one) for one in again} == {fingerprint}


@pytest.mark.slow
def test_a_stop_that_ends_changes_nothing(crew: Run, fingerprint: str, tmp_path: Path) -> None:
    ended = crew(
        faults.stop(rank=1, step=2, seconds=0.3) + faults.stop(rank=0, step=5, point="after update", seconds=0.1)
    )
    assert [one.code for one in ended] == [0, 0, 0]
    assert {fingerprint_of(one) for one in ended} == {fingerprint}
    assert faults.happened(tmp_path / "marks").keys() == {0, 1}


@pytest.mark.slow
def test_a_stop_that_does_not_end_is_a_lost_worker(crew: Run) -> None:
    kill = Kill("lost", ranks=(1,), by=0)
    first, stopped, second = crew(faults.stop(rank=1, step=2), environment={"TIMEOUT": "6"}, kill=kill)
    assert stopped.code == -9
    codes = sorted([first.code, second.code])
    assert codes in ([5, 124], [124, 124])  # who sees that the other one has given up, or rank 1 was killed, gives up
    assert all(re.search(r"waited \d+ s for rank 1", one.err) for one in (first, second) if one.code == 124)
    assert steps_of(stopped) == [0, 1]


def test_an_exit_has_its_code(crew: Run) -> None:
    ended = crew(faults.exit(rank=2, step=3, code=77))
    assert [one.code for one in ended] == [5, 5, 77]
    assert ended[2].err == ""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loaders", [0, 1])
def test_an_error_is_reported_with_its_text(crew: Run, loaders: int) -> None:
    plan = faults.error(rank=0, step=5, point="in the loader", text="no such sample")
    ended = crew(plan, environment={"LOADERS": str(loaders)})
    assert [one.code for one in ended] == [1, 5, 5]
    assert "RuntimeError" in ended[0].err and "no such sample" in ended[0].err
    assert ("DataLoader worker process 0" in ended[0].err) == (loaders == 1)
    assert steps_of(ended[0]) == [0, 1, 2, 3, 4]


def test_a_process_that_loads_is_killed(crew: Run) -> None:
    """Not the worker: it finds out, and says so."""
    ended = crew(faults.kill(rank=1, step=4, point="in the loader"), environment={"LOADERS": "1"})
    assert [ended[0].code, ended[2].code] == [5, 5]
    in_an_item = "A loader process (workers_per_loader) ended"
    assert ended[1].code != 0 and any(words in ended[1].err for words in ("killed by signal: Killed", in_an_item))


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"seconds": 0.01}, {"factor": 3}], ids=str)
def test_slow_changes_nothing_but_the_time(crew: Run, fingerprint: str, how: Any) -> None:
    ended = crew(faults.slow(rank=1, step=2, until=6, **how))
    assert [one.code for one in ended] == [0, 0, 0], ended[1].err
    assert {fingerprint_of(one) for one in ended} == {fingerprint}


def test_a_dropped_network_is_a_lost_worker(crew: Run) -> None:
    ended = crew(faults.drop_network(rank=1, step=3), one_machine=False)
    assert [one.code for one in ended] == [5, 5, 5]
    assert all("WorkerLost" in one.err for one in ended)
    assert all(steps_of(one)[-1] == 2 for one in ended)


@pytest.mark.slow
def test_a_full_disk_is_a_checkpoint_error(crew: Run, tmp_path: Path) -> None:
    ended = crew(faults.fill_disk(rank=0, step=5, under=tmp_path / "saved"), 1)
    assert ended[0].code == 4
    assert os.strerror(errno.ENOSPC) in ended[0].err
    assert [path.name for path in (tmp_path / "saved").glob("step-*")] == ["step-000004"]
    again = crew(Plan(), 2)
    assert [one.code for one in again] == [0, 0]


@pytest.mark.slow
def test_without_a_plan_the_actions_are_not_loaded(ranks: Run, tmp_path: Path) -> None:
    script = """
import sys
from subjects import CASES, train, tell
train(CASES["mlp, momentum"](), 1)
tell(loaded="paceline.testing.ordered_faults" in sys.modules)
"""
    (one,) = ranks(script, 1, tmp_path)
    assert json.loads(one.out)["loaded"] is False
    (one,) = ranks(script, 1, tmp_path, environment=faults.kill(rank=0, step=9).environment())
    assert json.loads(one.out)["loaded"] is True


# The plan as data.


def test_a_plan_travels_as_text(tmp_path: Path) -> None:
    plan = faults.kill(rank=1, step=7, point="inside the collective") + faults.stop(rank=2, step=12, seconds=3)
    plan += faults.slow(rank=0, seconds=0.05) + faults.fill_disk(rank=0, step=1, under=tmp_path)
    (text,) = plan.environment(tmp_path / "marks").values()
    assert faults.read(text) == Plan(plan.faults, tmp_path / "marks")
    assert [fault.kind for fault in plan.faults] == ["kill", "stop", "slow", "fill disk"]
    one, two = (faults.read(plan.environment()["PACELINE_FAULTS"]).directory for _ in range(2))
    assert one != two


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: faults.kill(rank=0, step=1, point="nowhere"), "no point 'nowhere' in a step; .*before forward"),
        (lambda: faults.kill(rank=-1, step=1), "rank -1 and step 1"),
        (lambda: faults.slow(rank=0), "seconds=None, factor=None"),
        (lambda: faults.slow(rank=0, factor=0.5), "factor=0.5"),
        (lambda: faults.read("[]"), "PACELINE_FAULTS holds no plan"),
        (
            lambda: faults.read('{"faults": [{"kind": "flood", "rank": 0, "step": 0, "point": "after update"}]}'),
            "flood",
        ),
        (lambda: faults.read('{"faults": [{"what": "kill"}]}'), "holds no plan"),
    ],
)
def test_a_plan_that_makes_no_sense(make: Callable[[], object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make()


# What a process meets.


@pytest.fixture
def struck(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, instead of happening."""
    found: list[str] = []
    monkeypatch.setattr(ordered_faults, "strike", lambda fault: found.append(fault.kind))
    monkeypatch.setattr(time, "sleep", lambda _: found.append("slow"))
    return found


def process(plan: Plan, marks: Path, rank: int) -> tuple[OrderedFaults, list[int]]:
    """A process with a rank that may change."""
    ranks = [rank]
    return OrderedFaults(plan, marks, lambda: ranks[0]), ranks


def test_a_fault_happens_once_whoever_gets_there_again(tmp_path: Path, struck: list[str]) -> None:
    plan = faults.kill(rank=1, step=3)
    first, second, other = (process(plan, tmp_path, rank)[0] for rank in (1, 1, 0))
    for step in range(5):
        for one in (other, first, first, second):
            one.reach("after update", step)
            one.reach("before forward", step)
    assert struck == ["kill"]
    assert faults.happened(tmp_path)[0]["step"] == 3


def test_a_slow_worker_stays_slow_with_another_rank(tmp_path: Path, struck: list[str]) -> None:
    plan = faults.slow(rank=1, step=2, until=5, seconds=1)
    (first, one), (second, two) = (process(plan, tmp_path, rank) for rank in (1, 2))
    for step in range(3):
        first.reach("before forward", step)
        second.reach("before forward", step)
    assert struck == ["slow"]
    one[0], two[0] = 0, 1  # a worker was lost, the others close up
    second.reach("before forward", 3)
    assert struck == ["slow"]
    for step in range(3, 7):
        first.reach("before forward", step)
    assert struck == ["slow"] * 3


def test_the_next_recovery_is_the_one(tmp_path: Path, struck: list[str]) -> None:
    one, _ = process(faults.kill(rank=0, step=4, point="during recovery"), tmp_path, 0)
    for step in (2, 7, 8):
        one.reach("during recovery", step)
    assert struck == ["kill"]
    assert faults.happened(tmp_path)[0]["step"] == 7


def test_to_reach_a_point_without_a_plan_is_nothing() -> None:
    fault_points.reach("during recovery", 5)
