"""Parameter servers of workers without shared memory: a worker, a server, both holders of a shard are lost."""

import json
from typing import Any

import pytest
from launching import Ran, Run
from test_asynchronous import ELASTIC, SCRIPT, STEPS, STOPPING, Point, check, started
from test_recovery import PLAIN
from test_recovery import check as check_bits

from paceline.testing import faults

NETWORK = """
import paceline.comm.shm.arena, paceline.training.recovery.formation
paceline.training.recovery.formation.can_share = lambda: False
"""
ASYNC = ["async", "bounded", "dedicated"]


def over_network(run: Run, way: str, plan: Any, *words: Any, script: str = SCRIPT) -> Ran:
    return started(run, way, plan, *(words or ELASTIC), script=NETWORK + script)


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("way", ASYNC)
def test_one_is_killed(run: Run, way: str, victim: int) -> None:
    ran = over_network(run, way, faults.kill(rank=victim, step=5))
    check(ran, 2)
    assert ran.survivors() == [number for number in range(3) if number != victim], ran.report()
    counted = [sum(one["delays"].values()) for one in ran.events() if one["event"] == "staleness"]
    assert STEPS - 1 <= counted[-1] <= STEPS, ran.report()


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("server", [{"count": 1}, {"count": 2}, {"count": 1, "dedicated": True}], ids=str)
def test_sync_has_the_bits_of_an_undisturbed_run(
    run: Run, undisturbed: Any, server: dict[str, Any], victim: int
) -> None:
    given = json.dumps({"strategy": "parameter-server", "server": server})
    plan = faults.kill(rank=victim, step=5, point="between reduction and update" if victim else "after update")
    ran = run(NETWORK + PLAIN, *ELASTIC, faults=plan, GIVEN=given)
    check_bits(ran, undisturbed(PLAIN), 2)


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize("point", ["in the loader", "between reduction and update", "after update", "in evaluate"])
@pytest.mark.parametrize("way", ["async", "sync"])
def test_a_kill_at_each_point(run: Run, way: str, point: Point) -> None:
    """Of rank 1, which holds the copy of what is at rank 0: both make each update."""
    check(over_network(run, way, faults.kill(rank=1, step=9 if point == "in evaluate" else 4, point=point)), 2)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["async", "dedicated"])
def test_a_stopped_worker_is_dropped(run: Run, way: str) -> None:
    """It stops in an update of the copy that it holds: who has pushed the gradients waits for it."""
    given = "sample_counts.start(hang_seconds=10, optimizer=partial(Stopping, lr=2.0**-6), "
    script = STOPPING + SCRIPT.replace("sample_counts.start(", given)
    ran = over_network(run, way, None, *ELASTIC, "--grace", 1, script=script)
    check(ran, 2)
    assert ran.survivors() == [0, 2], ran.report()
    assert "rank 1" in ran.launcher("lost")[0]["reason"], ran.report()


KILLED_AT_ONCE = """
    if (session.rank, session._context.world.generation, batch.step) == (0, 0, 6):
        import signal
        for member in session._context.world.coordinator._members[1::-1]:
            os.kill(member.pid, signal.SIGKILL)
    scripted.say"""


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize("way", ["async", "sync"])
@pytest.mark.parametrize("saved", [True, False], ids=["saved", "not saved"])
def test_both_holders_are_lost(run: Run, way: str, saved: bool) -> None:
    """Only a checkpoint has the state of the optimizer then, or the weights."""
    words = ("--set", "checkpoint.every=4", "--set", "checkpoint.background=false") if saved else ()
    ran = over_network(run, way, None, *ELASTIC, *words, script=SCRIPT.replace("    scripted.say", KILLED_AT_ONCE))
    if saved:
        assert ran.code == 0, ran.report()
        assert ran.printed() and all(one["weights"] == one["wanted"] for one in ran.printed()), ran.report()
        assert {one["step"] for one in ran.events() if one["event"] == "resume"} == {4}, ran.report()
    else:
        assert ran.code == 4, ran.report()
        assert "held by lost workers only, and there is no checkpoint" in ran.said, ran.report()
