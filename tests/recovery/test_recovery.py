"""Workers are lost at any moment; the others go on in their processes, to the bits of an undisturbed run."""

import re
from typing import Any

import pytest
from launching import Ran, Run

from paceline.testing import faults
from paceline.testing.faults import Point

STEPS = 12
PLAIN = f"""
import scripted

session = scripted.begin()
for batch in session.batches(steps={STEPS}):
    scripted.say(session, session.step(batch))
scripted.end(session)
"""

# measures, saves, and loads in other processes where it is asked to
MORE = f"""
import os
import scripted
from subjects import images

session = scripted.begin(checkpoint={{"every": 4}}, workers_per_loader=int(os.environ.get("LOADERS", 0)))
values = []
for batch in session.batches(steps={STEPS}):
    scripted.say(session, session.step(batch))
    if session.position % 5 == 0:
        values.append(session.evaluate(images(70)).hex())
        print("evaluated", flush=True)
scripted.end(session, values=values)
"""

OVER_THE_NETWORK = """
import paceline.comm.shm.arena, paceline.training.recovery.formation
paceline.training.recovery.formation.can_share = lambda: False
"""


def check(ran: Ran, wanted: dict[str, Any], finishers: int, steps: int = STEPS) -> None:
    """The run came to its end with so many workers that were there all the time, and joiners perhaps."""
    assert ran.code == 0, ran.report()
    ran.check_steps(steps)
    assert len(ran.printed()) >= finishers, ran.report()
    for told in ran.printed():
        values = wanted.get("values", [])
        own = told.get("values", values)
        assert told | {"values": values} == wanted | {"values": values}, ran.report()
        assert own == values[len(values) - len(own) :], ran.report()  # a joiner has missed the first ones


ELASTIC = "-n", 3, "--elastic", "1:3"


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize(("victims", "path"), [((0, 1), "memory"), ((1, 2), "network"), ((0, 2), "network")], ids=str)
def test_two_are_killed_at_once(run: Run, undisturbed: Any, victims: tuple[int, int], path: str) -> None:
    script = PLAIN if path == "memory" else OVER_THE_NETWORK + PLAIN
    both = faults.kill(rank=victims[0], step=5) + faults.kill(rank=victims[1], step=5)
    check(run(script, *ELASTIC, faults=both), undisturbed(PLAIN), 1)


# the step, or the number of steps done, at which the point is reached
AT: dict[Point, int] = {
    "before forward": 6,
    "in the loader": 6,
    "inside the collective": 6,
    "between reduction and update": 6,
    "inside a save": 8,
    "after update": 6,
    "in evaluate": 5,
}


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("point", AT)
def test_a_kill_at_each_point(run: Run, undisturbed: Any, point: Point, victim: int) -> None:
    if point == "inside a save" and victim != 0:
        pytest.skip("rank 0 writes")
    ran = run(MORE, *ELASTIC, faults=faults.kill(rank=victim, step=AT[point], point=point))
    check(ran, undisturbed(MORE), 2)
    assert ran.saved()[-1] == STEPS
    assert len(ran.launcher("lost")) == 1


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_during_recovery(run: Run, undisturbed: Any, victim: int) -> None:
    plan = faults.kill(rank=2, step=5) + faults.kill(rank=victim, step=5, point="during recovery")
    check(run(PLAIN, *ELASTIC, faults=plan), undisturbed(PLAIN), 1)


FAILS_TO_JOIN = """
import scripted
from paceline.training.recovery.formation import Formation
from paceline.errors import WorkerLost

scripted.hold_back(3, "end")  # it would be told, too
join, failed = Formation.join, set()

def join_at_the_second_try(formation, generation):
    if generation.number == 1 and not failed:
        failed.add(1)
        raise WorkerLost("the others could not be reached")
    join(formation, generation)

Formation.join = join_at_the_second_try
"""


@pytest.mark.slow
def test_who_was_lost_is_told_after_a_membership_that_could_not_be_joined(run: Run, undisturbed: Any) -> None:
    ran = run(FAILS_TO_JOIN + PLAIN, *ELASTIC, faults=faults.kill(rank=2, step=5))
    check(ran, undisturbed(PLAIN), 2)
    recovered = (one for one in ran.events() if one["event"] == "recovered")
    recoveries = [(one["generation"], one["lost"]) for one in recovered if one["lost"]]
    assert recoveries == [(2, [2]), (2, [2])]


@pytest.mark.slow
def test_a_kill_beside_processes_that_load(run: Run, undisturbed: Any) -> None:
    check(run(MORE, *ELASTIC, faults=faults.kill(rank=1, step=6), LOADERS="1"), undisturbed(MORE), 2)


@pytest.mark.slow
def test_an_exit_in_the_last_step(run: Run, undisturbed: Any) -> None:
    """The others have what it gave to the step, and come to the end."""
    plan = faults.exit(rank=2, step=STEPS - 1, point="between reduction and update", code=7)
    check(run(PLAIN, *ELASTIC, faults=plan), undisturbed(PLAIN), 2)


@pytest.mark.slow
def test_a_process_that_loads_is_killed(run: Run) -> None:
    """Its worker fails: the run ends with the state that it had. If it could not even report that, it is only lost."""
    ran = run(MORE, *ELASTIC, faults=faults.kill(rank=1, step=6, point="in the loader"), LOADERS="1")
    if not list((ran.run / "errors").iterdir()):
        assert ran.code == 0, ran.report()
        return
    assert ran.code == 1, ran.report()
    assert re.search("rank 1: RuntimeError: (DataLoader worker|A loader process)", ran.said), ran.report()
    assert ran.saved()[-1] in (5, 6), ran.report()


# a joiner comes in the middle of the loop, at the step that the parameter names
JOINED = """
import sys
import scripted
from subjects import images

way, at = sys.argv[1], int(sys.argv[2])
session = scripted.begin(workers_per_loader=int(os.environ.get("LOADERS", 0)))
values = []

def body(batch):
    if batch.step == at:
        scripted.await_joiner(session)
    scripted.say(session, session.step(batch))
    if way == "in the loop" and session.position % 3 == 0:
        values.append(session.evaluate(images(70)).hex())
        values.append(session.evaluate(images(30)).hex())

if way == "in the loop":
    for batch in session.batches(steps=STEPS):
        body(batch)
else:
    for epoch in range(STEPS // 4):
        for batch in session.batches(epochs=1):
            body(batch)
        values.append(session.evaluate(images(70)).hex())
        values.append(session.evaluate(images(30)).hex())
scripted.end(session, last=values[-1])
""".replace("STEPS", str(STEPS)).replace("import sys", "import os, sys")


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize(
    ("way", "at"), [("in the loop", 4), ("in the loop", 7), ("after each epoch", 5), ("after each epoch", 8)]
)
def test_a_joiner_evaluates_with_the_others(run: Run, undisturbed: Any, way: str, at: int) -> None:
    ran = run(JOINED, *ELASTIC, faults=faults.kill(rank=1, step=2), arguments=(way, at))
    check(ran, undisturbed(JOINED, arguments=(way, at)), 3)
    assert sorted(ran.memberships()[-1]) == [0, 2, 3], ran.report()
