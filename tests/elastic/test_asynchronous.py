"""Workers and servers are lost, leave and join in asynchronous training: each sample is still used exactly once.

The weights of the task count the samples (``counted``): a step that was lost, or was applied twice, would show.
"""

import json
from typing import Any

import pytest
from launchers import Ran, Run

from paceline.testing import faults
from paceline.testing.faults import Plan, Point

SCRIPT = """
import json, os
import counted, crew

given = {"strategy": "parameter-server", "server": json.loads(os.environ["SERVER"])}
if os.environ["SERVER"] == "{}":
    given = {"strategy": "hogwild", "model": counted.table(), "data": counted.rows(), "forward": counted.picked}
session = counted.start(**given)
for batch in session.batches(epochs=3):
    crew.say(session, session.step(batch))
    if session.position == 9:
        session.evaluate(given.get("data") or counted.TensorDataset(counted.inputs()))
(weight,) = session._job.compute.model.parameters()
wanted = counted.expected(3) if os.environ["SERVER"] != "{}" else [-3 * 2.0**-10]
crew.end(session, weights=sorted(set(weight.flatten().tolist())), wanted=sorted(wanted))
"""
STEPS = 24
WAYS = {
    "hogwild": {},
    "async": {"mode": "async"},
    "bounded": {"mode": "bounded", "staleness": 1, "drop_after": 2},
    "dedicated": {"mode": "async", "dedicated": True},
    "sync": {"mode": "sync"},
    "sync, dedicated": {"mode": "sync", "dedicated": True},
}
WAY = pytest.mark.parametrize("way", WAYS)
ELASTIC = "-n", 3, "--elastic", "1:3"


def check(ran: Ran, finishers: int) -> None:
    assert ran.code == 0, ran.story()
    told = ran.told()
    assert len(told) >= finishers, ran.story()
    assert len({one["fingerprint"] for one in told}) == 1, ran.story()
    for one in told:
        if len(one["wanted"]) == 1 and ran.launcher("lost"):  # HogWild: an update under way may be there once more
            (wanted,) = one["wanted"]
            assert wanted in one["weights"] and {*one["weights"]} <= {wanted, wanted * 4 / 3}, ran.story()
        else:
            assert one["weights"] == one["wanted"], ran.story()


def started(run: Run, way: str, plan: Plan | None, *words: Any, script: str = SCRIPT) -> Ran:
    return run(script, *(words or ELASTIC), faults=plan, SERVER=json.dumps(WAYS[way]), SLOW="0.002,0.001,0.003")


@pytest.mark.parametrize("victim", [0, 2])
@WAY
def test_one_is_killed(run: Run, way: str, victim: int) -> None:
    ran = started(run, way, faults.kill(rank=victim, step=5))
    check(ran, 2)
    assert ran.views()[:2] == [[0, 1, 2], [number for number in range(3) if number != victim]]
    counted = [sum(one["delays"].values()) for one in ran.events() if one["event"] == "staleness"]
    if WAYS[way].get("mode") != "sync":  # each may have parted between an update and its count
        assert STEPS - 3 <= counted[-1] <= STEPS, ran.story()


POINTS: list[Point] = ["in the loader", "between reduction and update", "after update", "in evaluate"]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("way", ["async", "dedicated", "sync"])
def test_a_kill_at_each_point(run: Run, way: str, point: Point) -> None:
    victim = 0 if way == "dedicated" and point != "in the loader" else 1
    ran = started(run, way, faults.kill(rank=victim, step=9 if point == "in evaluate" else 4, point=point))
    check(ran, 2)


@pytest.mark.parametrize("way", ["hogwild", "async", "dedicated"])
def test_one_is_left(run: Run, way: str) -> None:
    """It computes the steps that the others had begun."""
    check(started(run, way, faults.kill(rank=0, step=5) + faults.kill(rank=1, step=5)), 1)


@pytest.mark.parametrize("way", ["async", "dedicated", "sync"])
def test_another_one_takes_the_place(run: Run, way: str) -> None:
    ran = started(run, way, faults.kill(rank=1, step=5), "-n", 3, "--elastic", "3:3", "--standby", 1)
    check(ran, 3)
    assert ran.views()[:2] == [[0, 1, 2], [0, 2, 3]]


@WAY
def test_one_is_told_to_leave(run: Run, way: str) -> None:
    script = SCRIPT.replace("    crew.say", "    crew.leave(session, batch, 2, 4)\n    crew.say")
    ran = started(run, way, None, script=script)
    check(ran, 2)
    assert ran.views() == [[0, 1, 2], [0, 1]], ran.story()
    assert ran.launcher("lost") == []


@WAY
def test_all_are_told_to_end(run: Run, way: str) -> None:
    """The state is saved once, and the run that goes on has used each sample once."""
    script = SCRIPT.replace("    crew.say", "    crew.end_launcher(session, batch, 5)\n    crew.say")
    ran = started(run, way, None, *ELASTIC, script=script)
    assert ran.code == 75, ran.story()
    assert len(ran.saved()) == 1 and 5 <= ran.saved()[0] < STEPS
    check(started(run, way, None, *ELASTIC, "--resume", "auto"), 3)


@pytest.mark.parametrize("way", ["hogwild", "bounded", "dedicated"])
def test_a_run_that_is_not_elastic_is_told_to_end(run: Run, way: str) -> None:
    script = SCRIPT.replace("    crew.say", "    crew.end_launcher(session, batch, 5)\n    crew.say")
    ran = started(run, way, None, "-n", 3, script=script)
    assert ran.code == 75, ran.story()
    check(started(run, way, None, "-n", 2, "--resume", "auto"), 2)


STOPPING = """
import os, signal, torch
from functools import partial

class Stopping(torch.optim.SGD):
    updates = 0

    def step(self):
        Stopping.updates += 1
        if os.environ.get("PACELINE_WORKER") == "1" and Stopping.updates == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        super().step()
"""


@pytest.mark.parametrize("way", ["async", "sync"])
def test_a_stopped_worker_is_dropped(run: Run, way: str) -> None:
    """In ``async`` it has the lock that every update needs: who waits for that waits for it."""
    script = SCRIPT.replace("counted.start(", "counted.start(hang_seconds=1, ")
    plan = None
    if way == "sync":
        plan = faults.stop(rank=1, step=5, point="between reduction and update")
    else:  # nobody knows which steps it takes
        script = STOPPING + script.replace("counted.start(", "counted.start(optimizer=partial(Stopping, lr=2.0**-6), ")
    ran = started(run, way, plan, *ELASTIC, "--grace", 1, script=script)
    check(ran, 2)
    assert ran.views() == [[0, 1, 2], [0, 2]], ran.story()
    (lost,) = ran.launcher("lost")
    assert "rank 1" in lost["reason"] and "late" in lost["reason"]
