"""Workers join, leave, stop and come back; launchers are told to end; scripts fail. The state is never lost."""

import json
from typing import Any

import pytest
from launching import Ran, Run
from test_recovery import ELASTIC, OVER_THE_NETWORK, PLAIN, STEPS, check

from paceline.testing import faults

# at the steps that are named in order, the workers wait for one to join
JOINED = f"""
import sys
import scripted

waits = [int(word) for word in sys.argv[1:]]
session = scripted.begin()
for batch in session.batches(steps={STEPS}):
    if batch.step in waits:
        scripted.await_joiner(session)
    scripted.say(session, session.step(batch))
scripted.end(session)
"""
PATHS = pytest.mark.parametrize("path", ["memory", "network"])


def on(path: str, script: str) -> str:
    return script if path == "memory" else OVER_THE_NETWORK + script


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_standby_takes_the_place(run: Run, undisturbed: Any, victim: int) -> None:
    """With as many workers as there must be, the others wait until the standby has come."""
    plan = faults.kill(rank=victim, step=5)
    script = "import scripted\nscripted.hold_back(3, 'membership', 2)\n" + PLAIN
    ran = run(OVER_THE_NETWORK + script, "-n", 2, "--elastic", "2:2", "--standby", 1, faults=plan)
    check(ran, undisturbed(PLAIN), 2)
    assert ran.memberships()[:2] == [[0, 1], [1 - victim, 2]]
    assert ran.steps("worker-2")[-1] == STEPS - 1


# Workers 1 and 2 die, whatever their rank is by then; others join when worker 0 is alone.
DOWN_TO_ONE = """
import os, signal
from pathlib import Path
import scripted

worker, alone = int(os.environ["PACELINE_WORKER"]), Path(os.environ["PACELINE_RUN"]) / "alone"
if worker > 2:
    scripted.wait_until(alone.exists, "worker 0 to be alone")
""" + JOINED.replace(
    "    if batch",
    """    if batch.step == 2 and worker in (1, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    if batch.step > 2 and session.workers == 1:
        alone.touch()
    if batch""",
)


@pytest.mark.sampled(1)
@PATHS
def test_down_to_one_and_up_again(run: Run, undisturbed: Any, path: str) -> None:
    ran = run(on(path, DOWN_TO_ONE), *ELASTIC, arguments=(4,))
    check(ran, undisturbed(JOINED, (4,)), 2)
    assert [0] in ran.memberships()
    assert ran.memberships()[-1] in ([0, 3], [0, 3, 4], [0, 4, 3], [0, 4]), ran.report()


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize(("victim", "path"), [(1, "memory"), (0, "network")])
def test_a_kill_during_a_join(run: Run, undisturbed: Any, victim: int, path: str) -> None:
    """The third worker is killed, another one joins; on the way there one of the two that are left is killed."""
    plan = faults.kill(rank=2, step=2) + faults.kill(rank=victim, step=3, point="during recovery")
    script = "import scripted\nscripted.hold_back(3, 'membership', 2)\n" + JOINED
    ran = run(on(path, script), *ELASTIC, faults=plan, arguments=(4,))
    check(ran, undisturbed(JOINED, (4,)), 2)
    assert len(ran.launcher("lost")) == 2
    assert 3 in ran.memberships()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["before", "within", "after"])
def test_a_joiner_is_killed_on_its_way(run: Run, undisturbed: Any, point: str) -> None:
    """Before it is in a view; while it takes the state; when it is there and takes its first step."""
    kill = {
        "before": "paceline.comm.rendezvous.coordinator_client.CoordinatorClient.register = die",
        "within": "paceline.training.recovery.recovery.Recovery._take_over = die",
        "after": "paceline.step.optimizer.OptimizerStep.apply = die",
    }[point]
    script = (
        f"""
import os
import paceline.comm.rendezvous.coordinator_client, paceline.training.recovery.recovery, paceline.step.optimizer
def die(*_):
    os.kill(os.getpid(), 9)
if os.environ["PACELINE_WORKER"] == "3":
    if {point != "within"}:
        paceline.training.recovery.recovery.warm_up = lambda *_: lambda: None
    {kill}
"""
        + JOINED
    )
    plan = faults.kill(rank=1, step=2)
    ran = run(script, *ELASTIC, faults=plan, arguments=(4,))
    check(ran, undisturbed(JOINED, (4,)), 3 if point == "before" else 2)
    assert "SIGKILL" in ran.said or len(ran.launcher("lost")) >= 1


# Worker 0 wakes the one that was stopped when the others have dropped it and gone on.
WAKING = JOINED.replace(
    "    if batch.step in",
    """    if batch.step == 0:
        others = session._context.world.coordinator._members[1:]
    if batch.step == 7 and session.rank == 0 and "ALONE" not in os.environ:
        scripted.wait_until(lambda: scripted._recorded("lost"), "the loss")
        os.kill(others[0].pid, signal.SIGCONT)
    if batch.step in""",
).replace("import sys", "import os, signal, sys")


@pytest.mark.slow(turns=6)
def test_a_stopped_worker_is_dropped_and_comes_back(run: Run, undisturbed: Any) -> None:
    plan = faults.stop(rank=1, step=3)
    given = json.dumps({"hang_seconds": 10})
    ran = run(OVER_THE_NETWORK + WAKING, *ELASTIC, faults=plan, arguments=(8,), GIVEN=given)
    assert ran.code == 0, ran.report()
    wanted = undisturbed(JOINED, (8,))
    assert ran.printed() == [wanted] * 3, ran.report()
    assert [sorted(members) for members in ran.memberships()] == [[0, 1, 2], [0, 2], [0, 1, 2]], ran.report()
    (lost,) = ran.launcher("lost")
    assert "rank 1" in lost["reason"] and "late" in lost["reason"]
    assert ran.steps("rank-0") == list(range(STEPS))
    assert ran.steps("rank-1")[:3] == [0, 1, 2] and ran.steps("rank-1")[-1] == STEPS - 1


@pytest.mark.slow(turns=6)
def test_a_launcher_that_is_told_to_end(run: Run, undisturbed: Any) -> None:
    """Its only worker finishes its step, the state is saved once, and a resumed run ends as if nothing had happened."""
    script = PLAIN.replace("    scripted.say", "    scripted.end_launcher(session, batch, 6)\n    scripted.say")
    ran = run(script, "-n", 1, "--elastic", "1:3", "--set", "checkpoint.every=5")
    assert ran.code == 75, ran.report()
    assert len(ran.saved()) == 2 and ran.saved()[0] == 5
    assert 7 <= ran.saved()[1] < STEPS
    again = run(PLAIN, "-n", 2, "--elastic", "1:3", "--resume", "auto", faults=None)
    assert again.code == 0, again.report()
    wanted = undisturbed(PLAIN)
    assert {told["fingerprint"] for told in again.printed()} == {wanted["fingerprint"]}


@pytest.mark.slow
def test_below_the_least(run: Run) -> None:
    """Nobody replaces the lost worker in time: the run ends with the last step saved."""
    script = "import os, time\nif int(os.environ['PACELINE_WORKER']) > 2:\n    time.sleep(60)\n" + PLAIN
    plan = faults.kill(rank=1, step=5)
    ran = run(script, "-n", 3, "--elastic", "3:3", "--patience", 4, "--grace", 1, faults=plan)
    assert ran.code == 5, ran.report()
    assert ran.saved() == [5]
    assert "2 of at least 3 workers" in ran.said + json.dumps(ran.launcher("end"))


@pytest.mark.slow
def test_below_the_least_until_a_new_one_comes(run: Run, undisturbed: Any) -> None:
    ran = run(PLAIN, "-n", 3, "--elastic", "3:3", faults=faults.kill(rank=1, step=5))
    check(ran, undisturbed(PLAIN), 3)
    assert [sorted(members) for members in ran.memberships()] == [[0, 1, 2], [0, 2, 3]]


@pytest.mark.slow
def test_an_exception_ends_the_run_with_the_state(run: Run, undisturbed: Any) -> None:
    ran = run(PLAIN, *ELASTIC, faults=faults.error(rank=1, step=5, text="no such thing"))
    assert ran.code == 1, ran.report()
    assert "rank 1: RuntimeError: no such thing" in ran.said
    assert ran.saved() == [5]
    again = run(PLAIN, "-n", 2, "--resume", "auto")
    check_end(again, undisturbed(PLAIN))


@pytest.mark.slow(turns=6)
def test_a_joiner_that_cannot_take_part(run: Run, undisturbed: Any) -> None:
    """A script that fails at its start on the new worker does not end the run."""
    script = f"""
import os, scripted

joins = os.environ["PACELINE_WORKER"] == "3"
session = scripted.begin(batch=1 if joins else 32)
for batch in session.batches(steps={STEPS}):
    if batch.step == 6:
        scripted.await_end_of(3)
    scripted.say(session, session.step(batch))
scripted.end(session)
"""
    ran = run(script, *ELASTIC, faults=faults.kill(rank=1, step=2))
    check(ran, undisturbed(script), 2)
    (noted,) = ran.launcher("not-joined")
    assert "batch = 1" in noted["reason"]
    assert len(ran.memberships()) == 2


@pytest.mark.slow
def test_a_script_that_ends_early_on_one_worker(run: Run) -> None:
    script = PLAIN.replace(
        "    scripted.say", "    if batch.step == 5 and session.rank == 1:\n        break\n    scripted.say"
    )
    ran = run(script, *ELASTIC)
    assert ran.code != 0, ran.report()
    assert ran.saved() == [5]


def check_end(ran: Ran, wanted: dict[str, Any]) -> None:
    assert ran.code == 0, ran.report()
    for told in ran.printed():
        assert told == wanted


@pytest.mark.slow
def test_without_exact_bits(run: Run, undisturbed: Any) -> None:
    """The loss is close, the steps are all there."""
    given = json.dumps({"exact": False})
    script = PLAIN.replace("scripted.say(session, session.step(batch))", "report = session.step(batch)").replace(
        "scripted.end(session)", "scripted.end(session, loss=report.loss)"
    )
    ran = run(script, *ELASTIC, faults=faults.kill(rank=1, step=5), GIVEN=given)
    assert ran.code == 0, ran.report()
    wanted = undisturbed(script, GIVEN=given)
    for told in ran.printed():
        assert told["loss"] == pytest.approx(wanted["loss"], rel=1e-3)
        assert told["position"] == STEPS
