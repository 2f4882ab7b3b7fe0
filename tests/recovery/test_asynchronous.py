"""Workers and servers are lost, leave and join in asynchronous training: each sample is still used exactly once.

The weights of the task count the samples (``counted``): a step that was lost, or was applied twice, would show.
"""

import json
import signal
from collections import Counter
from typing import Any

import pytest
from launching import Ran, Run

from paceline.observe import ledger
from paceline.testing import faults
from paceline.testing.faults import Plan, Point

SCRIPT = """
import json, os
import sample_counts, scripted

given = {"strategy": "parameter-server", "server": json.loads(os.environ["SERVER"])}
table = given["server"].pop("table", not given["server"])
if table:
    given |= {"forward": sample_counts.picked, "model": sample_counts.table(), "data": sample_counts.rows()}
if not given["server"]:
    given |= {"strategy": "hogwild"}
session = sample_counts.start(**given)
for batch in session.batches(epochs=3):
    scripted.say(session, session.step(batch))
    if session.position == 9:
        session.evaluate(given.get("data") or sample_counts.TensorDataset(sample_counts.inputs()))
(weight,) = session._context.compute.model.parameters()
wanted = [-3 * 2.0**-10] if table else sample_counts.expected(3)
scripted.end(session, weights=sorted(set(weight.flatten().tolist())), wanted=sorted(wanted))
"""
STEPS = 24
WAYS = {
    "hogwild": {},
    "async": {"mode": "async"},
    "bounded": {"mode": "bounded", "staleness": 1, "drop_after": 2},
    "dedicated": {"mode": "async", "dedicated": True},
    "sync": {"mode": "sync"},
    "sync, dedicated": {"mode": "sync", "dedicated": True},
    "rows": {"mode": "async", "table": True},
    "rows, dedicated": {"mode": "async", "table": True, "dedicated": True},  # over the network
    "sync, rows": {"mode": "sync", "table": True, "count": 2},
}
WAY = pytest.mark.parametrize("way", WAYS)
ELASTIC = "-n", 3, "--elastic", "1:3"


def check(ran: Ran, finishers: int) -> None:
    assert ran.code == 0, ran.report()
    told = ran.printed()
    assert len(told) >= finishers, ran.report()
    assert len({one["fingerprint"] for one in told}) == 1, ran.report()
    for one in told:
        assert one["weights"] == one["wanted"], ran.report()
    assert ledger.check(ledger.read(ran.run / "events"), STEPS) == [], ran.report()


def started(run: Run, way: str, plan: Plan | None, *words: Any, script: str = SCRIPT) -> Ran:
    return run(script, *(words or ELASTIC), faults=plan, SERVER=json.dumps(WAYS[way]), SLOW="0.002,0.001,0.003")


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize("victim", [0, 2])
@WAY
def test_one_is_killed(run: Run, way: str, victim: int) -> None:
    ran = started(run, way, faults.kill(rank=victim, step=5))
    check(ran, 2)
    assert ran.survivors() == [number for number in range(3) if number != victim], ran.report()
    counted = [sum(one["delays"].values()) for one in ran.events() if one["event"] == "staleness"]
    if WAYS[way].get("mode") != "sync":  # at a server each may have stopped between an update and its count
        assert STEPS - (0 if way == "hogwild" else 3) <= counted[-1] <= STEPS, ran.report()


POINTS: list[Point] = ["in the loader", "between reduction and update", "after update", "in evaluate"]


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("way", ["async", "dedicated", "sync", "rows", "sync, rows"])
def test_a_kill_at_each_point(run: Run, way: str, point: Point) -> None:
    victim = 0 if way == "dedicated" and point != "in the loader" else 1
    ran = started(run, way, faults.kill(rank=victim, step=9 if point == "in evaluate" else 4, point=point))
    check(ran, 2)


ENDING = """
import atexit, os, signal

def end():
    if os.environ["KILLED"] == "after its script" and os.environ.get("PACELINE_WORKER") == "0":
        os.kill(os.getpid(), signal.SIGKILL)

atexit.register(end)  # called after what the session registers later
"""


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize("killed", ["in a save", "after its script"])
@WAY
def test_rank_0_is_killed_at_the_end(run: Run, way: str, killed: str) -> None:
    """Another worker writes the checkpoint, and a server that has come to its end is not missed."""
    plan = faults.kill(rank=0, step=STEPS, point="inside a save") if killed == "in a save" else None
    script = ENDING + SCRIPT.replace("scripted.end", "session.save()\nscripted.end")
    ran = run(script, *ELASTIC, faults=plan, SERVER=json.dumps(WAYS[way]), KILLED=killed)
    assert ran.code == 0, ran.report()
    assert len(ran.printed()) == (2 if plan else 3), ran.report()
    assert all(one["weights"] == one["wanted"] for one in ran.printed()), ran.report()
    assert len([*ran.run.glob(f"checkpoints/step-{STEPS:06}/*/manifest.json")]) == 1, ran.report()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["hogwild", "async", "dedicated"])
def test_one_is_left(run: Run, way: str) -> None:
    """It computes the steps that the others had begun."""
    check(started(run, way, faults.kill(rank=0, step=5) + faults.kill(rank=1, step=5)), 1)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["async", "dedicated", "sync"])
def test_another_one_takes_the_place(run: Run, way: str) -> None:
    script = "import scripted\nscripted.hold_back(4, 'membership', 2)\n" + SCRIPT
    words = "-n", 3, "--elastic", "3:3", "--standby", 1
    ran = started(run, way, faults.kill(rank=1, step=5), *words, script=script)
    check(ran, 3)
    assert ran.memberships()[:2] == [[0, 1, 2], [0, 2, 3]]


@pytest.mark.sampled(1)
@WAY
def test_one_is_told_to_leave(run: Run, way: str) -> None:
    script = SCRIPT.replace("    scripted.say", "    scripted.leave(session, batch, 2, 4)\n    scripted.say")
    ran = started(run, way, None, script=script)
    check(ran, 2)
    assert ran.memberships() == [[0, 1, 2], [0, 1]], ran.report()
    assert ran.launcher("lost") == []


@pytest.mark.sampled(1, turns=6)
@WAY
def test_all_are_told_to_end(run: Run, way: str) -> None:
    """The state is saved once, and the run that goes on has used each sample once."""
    script = SCRIPT.replace("    scripted.say", "    scripted.end_launcher(session, batch, 5)\n    scripted.say")
    ran = started(run, way, None, *ELASTIC, script=script)
    assert ran.code == 75, ran.report()
    assert len(ran.saved()) == 1 and 5 <= ran.saved()[0] < STEPS
    check(started(run, way, None, *ELASTIC, "--resume", "auto"), 3)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["hogwild", "bounded", "dedicated"])
def test_a_run_that_is_not_elastic_is_told_to_end(run: Run, way: str) -> None:
    script = SCRIPT.replace("    scripted.say", "    scripted.end_launcher(session, batch, 5)\n    scripted.say")
    ran = started(run, way, None, "-n", 3, script=script)
    assert ran.code == 75, ran.report()
    check(started(run, way, None, "-n", 2, "--resume", "auto"), 2)


HELD = """
import os, signal
from pathlib import Path
import scripted
from paceline.strategies.parameter_server.async_steps import AsyncSteps
from paceline.step.optimizer import OptimizerStep

run, worker = Path(os.environ["PACELINE_RUN"]), os.environ["PACELINE_WORKER"]
claimed, made = run / "claimed", run / "made"
apply, enter, compute = OptimizerStep.apply, AsyncSteps._enter, AsyncSteps._compute

def apply_and_wait(update, done, *more, **named):
    told = apply(update, done, *more, **named)
    if worker == "0" and done >= 3 and not made.exists():
        made.touch()
        scripted.wait_until(lambda: session._loop.strategy._claims._words[0], "the others to part")
    return told

def enter_after_step_0(strategy, step):
    if worker == "2":  # all wait for step 0: another one computes it
        scripted.wait_until(lambda: strategy._claims.read().newest >= 0, "step 0")
    return enter(strategy, step)

def compute_and_die(strategy, step):
    if worker == "2":
        claimed.touch()
        scripted.wait_until(made.exists, "an update to be made")
        os.kill(os.getpid(), signal.SIGKILL)
    if step > 3:
        scripted.wait_until(claimed.exists, "worker 2 to claim a step")
    return compute(strategy, step)

OptimizerStep.apply, AsyncSteps._enter, AsyncSteps._compute = apply_and_wait, enter_after_step_0, compute_and_die
"""


def test_an_update_under_way_when_the_others_part_is_made_once(run: Run) -> None:
    ran = started(run, "hogwild", None, script=HELD + SCRIPT)
    check(ran, 2)
    assert ran.survivors() == [0, 1], ran.report()
    updates = [one for one in ran.events() if one["event"] == "update"]
    assert sorted(one["step"] for one in updates) == list(range(STEPS)), ran.report()
    assert sorted(one["version"] for one in updates) == list(range(1, STEPS + 1)), ran.report()
    *_, counted = [one["delays"] for one in ran.events() if one["event"] == "staleness"]
    assert counted == Counter(str(one["delay"]) for one in updates), ran.report()


SYNCHRONIZING = """
import os, signal
from pathlib import Path
import scripted
from paceline.strategies.parameter_server.async_steps import AsyncSteps

compute, claimed = AsyncSteps._compute, Path(os.environ["PACELINE_RUN"]) / "claimed"

def compute_and_die(strategy, step):
    worker = os.environ["PACELINE_WORKER"]
    if worker != "2" and step > 12:
        scripted.wait_until(claimed.exists, "worker 2 to claim a step")
    if worker == "2" and step > 9:
        claimed.touch()
        look = strategy._claims.read
        scripted.wait_until(lambda: look().top == 24 and [*look().open] == [step], "the others to synchronize")
        os.kill(os.getpid(), signal.SIGKILL)
    return compute(strategy, step)

AsyncSteps._compute = compute_and_die
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["hogwild", "async", "dedicated"])
def test_a_step_that_was_lost_as_all_synchronized_at_the_end_is_computed(run: Run, way: str) -> None:
    ran = started(run, way, None, script=SYNCHRONIZING + SCRIPT)
    check(ran, 2)
    assert ran.survivors() == [0, 1], ran.report()


# the others leave it steps until it has come to its end
LEFT_TO_WORKER_1 = """
import os
from pathlib import Path
import scripted
from paceline.strategies.parameter_server.async_steps import AsyncSteps

compute, ends = AsyncSteps._compute, Path(os.environ["PACELINE_RUN"]) / "ends"

def compute_later(strategy, step):
    if step > 3 and os.environ.get("PACELINE_WORKER") != "1":
        scripted.wait_until(ends.exists, "the end of worker 1")
    return compute(strategy, step)

AsyncSteps._compute = compute_later
"""
STOPPING = (
    LEFT_TO_WORKER_1
    + """
import signal, torch
from functools import partial

class Stopping(torch.optim.SGD):
    updates = 0

    def step(self):
        Stopping.updates += 1
        if os.environ.get("PACELINE_WORKER") == "1" and Stopping.updates == 2:
            ends.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        super().step()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["hogwild", "async", "sync"])
def test_a_stopped_worker_is_dropped(run: Run, way: str) -> None:
    """In ``async`` it has the lock that every update needs: who waits for that waits for it.

    In ``hogwild`` it is about to change the weights: those of its workers, not of those that go on without it.
    """
    script = SCRIPT.replace("sample_counts.start(", "sample_counts.start(hang_seconds=10, ")
    plan = None
    if way == "sync":
        plan = faults.stop(rank=1, step=5, point="between reduction and update")
    else:  # nobody knows which steps it takes
        script = STOPPING + script.replace(
            "sample_counts.start(", "sample_counts.start(optimizer=partial(Stopping, lr=2.0**-6), "
        )
    ran = started(run, way, plan, *ELASTIC, "--grace", 1, script=script)
    check(ran, 2)
    assert ran.survivors() == [0, 2], ran.report()
    (lost,) = ran.launcher("lost")
    assert "rank 1" in lost["reason"] and "late" in lost["reason"]


AFTER_AN_UPDATE = (
    LEFT_TO_WORKER_1
    + """
from paceline.system import fault_points

reach, reached = fault_points.reach, []

def end_after_an_update(point, *step):
    reach(point, *step)
    if point == "after update" and os.environ.get("PACELINE_WORKER") == "1":
        reached.append(step)
        if len(reached) == 2:
            ends.touch()
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))

fault_points.reach = end_after_an_update
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_update_of_a_worker_that_was_lost_just_after_it_counts_once(run: Run, number: signal.Signals) -> None:
    """Its samples are in the weights that the others go on with."""
    script = AFTER_AN_UPDATE + SCRIPT.replace("sample_counts.start(", "sample_counts.start(hang_seconds=10, ")
    ran = run(script, *ELASTIC, "--grace", 1, SERVER="{}", SLOW="0.002,0.001,0.003", SIGNAL=str(int(number)))
    check(ran, 2)
    assert ran.survivors() == [0, 2], ran.report()


WAKING = """
import os, signal, torch
from functools import partial
from pathlib import Path
import scripted

run, worker = Path(os.environ["PACELINE_RUN"]), os.environ["PACELINE_WORKER"]
stopped, woken = run / "stopped", run / "woken"

class Waking(torch.optim.SGD):
    def step(self):
        stops = worker == "1" and session._context.world.generation > 0 and not stopped.exists()
        if stops:
            told = run / "told"
            told.write_text(f"{os.getpid()} {session._context.world.generation}")
            told.rename(stopped)
            os.kill(os.getpid(), signal.SIGSTOP)
        super().step()
        if stops:
            woken.touch()

def wake(session):
    if worker == "0" and session._context.world.generation > 0 and session.position > 9 and not woken.exists():
        scripted.wait_until(stopped.exists, "the other one to stop")
        process, generation = map(int, stopped.read_text().split())
        if session._context.world.generation > generation:
            os.kill(process, signal.SIGCONT)
            scripted.wait_until(woken.exists, "the late update")
"""


@pytest.mark.slow
def test_a_stopped_worker_that_comes_back_in_an_update_changes_old_weights(run: Run) -> None:
    """A loss comes before: the memory of later generations is laid out alike."""
    given = "sample_counts.start(hang_seconds=10, optimizer=partial(Waking, lr=2.0**-6), "
    script = SCRIPT.replace("sample_counts.start(", given).replace("position == 9", "position in (9, 16)")
    script = script.replace("(batch))\n", "(batch))\n    wake(session)\n")
    ran = started(run, "hogwild", faults.kill(rank=2, step=2), *ELASTIC, script=WAKING + script)
    check(ran, 2)
    assert "late" in ran.launcher("lost")[-1]["reason"], ran.report()
    assert (ran.run / "woken").exists(), ran.report()
