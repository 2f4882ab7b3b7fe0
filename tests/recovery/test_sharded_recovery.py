"""Sharded workers are lost, leave and join: the divided state stays complete, or comes from a checkpoint."""

import json
from typing import Any

import pytest
from launching import Ran, Run
from test_recovery import ELASTIC, OVER_THE_NETWORK, PLAIN, check

from paceline.testing import faults

SHARDED = json.dumps({"strategy": "sharded"})
EVERY_3 = "--set", "checkpoint.every=3", "--set", "checkpoint.background=false"
TWO = "-n", 2, "--elastic", "2:2"
PATHS = pytest.mark.parametrize("path", ["memory", "network"])


def went_back(ran: Ran) -> list[int]:
    return [one["step"] for one in ran.events() if one["event"] == "went back"]


@PATHS
def test_a_lost_shard_comes_from_the_checkpoint(run: Run, undisturbed: Any, path: str) -> None:
    script = PLAIN if path == "memory" else OVER_THE_NETWORK + PLAIN
    ran = run(script, *ELASTIC, *EVERY_3, faults=faults.kill(rank=1, step=5), GIVEN=SHARDED)
    assert ran.code == 0, ran.report()
    assert {one["fingerprint"] for one in ran.printed()} == {undisturbed(PLAIN)["fingerprint"]}, ran.report()
    assert went_back(ran) == [3, 3], ran.report()


@pytest.mark.slow
@pytest.mark.parametrize("point", ["inside the collective", "between reduction and update", "after update"])
def test_a_worker_is_lost_inside_a_step(run: Run, undisturbed: Any, point: Any) -> None:
    """Some workers may have made the update, and others not."""
    ran = run(PLAIN, *ELASTIC, *EVERY_3, faults=faults.kill(rank=2, step=5, point=point), GIVEN=SHARDED)
    assert ran.code == 0, ran.report()
    assert {one["fingerprint"] for one in ran.printed()} == {undisturbed(PLAIN)["fingerprint"]}, ran.report()
    assert went_back(ran) == [3, 3], ran.report()


# Worker 1 is killed when it is to send its slices for the nth time.
KILLED = """
import os, signal
from paceline.strategies.sharded import strategy

send, calls = strategy.consolidate_state_dict, []
def consolidate(*given):
    calls.append(given)
    if os.environ.get("PACELINE_WORKER") == "1" and len(calls) == NTH and "ALONE" not in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    send(*given)
strategy.consolidate_state_dict = consolidate
"""


def test_a_worker_is_lost_while_the_state_is_put_together_for_a_save(run: Run, undisturbed: Any) -> None:
    """Those that are left do not take what they have for the whole."""
    ran = run(KILLED.replace("NTH", "2") + PLAIN, *ELASTIC, *EVERY_3, GIVEN=SHARDED)
    assert ran.code == 0, ran.report()
    assert {one["fingerprint"] for one in ran.printed()} == {undisturbed(PLAIN)["fingerprint"]}, ran.report()
    assert went_back(ran) == [3, 3], ran.report()


@pytest.mark.slow
def test_a_worker_is_lost_while_another_one_hands_over_its_slices(run: Run, undisturbed: Any) -> None:
    script = PLAIN.replace("    scripted.say", "    scripted.leave(session, batch, 2, 4)\n    scripted.say")
    ran = run(KILLED.replace("NTH", "2") + script, *ELASTIC, *EVERY_3, GIVEN=SHARDED)
    assert ran.code == 0, ran.report()
    assert {one["fingerprint"] for one in ran.printed()} == {undisturbed(PLAIN)["fingerprint"]}, ran.report()
    assert set(went_back(ran)) == {3}, ran.report()


def test_a_worker_that_is_told_to_leave(run: Run, undisturbed: Any) -> None:
    script = PLAIN.replace("    scripted.say", "    scripted.leave(session, batch, 1, 4)\n    scripted.say")
    ran = run(script, *ELASTIC, GIVEN=SHARDED)
    check(ran, undisturbed(PLAIN), 2)
    assert ran.memberships() == [[0, 1, 2], [0, 2]]


@PATHS
def test_a_standby_takes_the_place_of_a_worker_that_leaves(run: Run, undisturbed: Any, path: str) -> None:
    leaves = "    scripted.leave(session, batch, 1 if os.environ['PACELINE_WORKER'] == '1' else 9, 4)\n    scripted.say"
    script = "import os\nimport scripted\nscripted.hold_back(3, 'membership', 2)\n"
    script += PLAIN.replace("    scripted.say", leaves)
    ran = run(OVER_THE_NETWORK * (path == "network") + script, *TWO, "--standby", 1, GIVEN=SHARDED)
    check(ran, undisturbed(PLAIN), 2)
    assert ran.memberships()[:2] == [[0, 1], [0, 2]], ran.report()
