"""Sharded workers are lost, leave and join: the divided state stays complete, or comes from a checkpoint."""

import json
from typing import Any

import pytest
from launching import Ran, Run
from test_recovery import ELASTIC, OVER_THE_NETWORK, PLAIN, check

from paceline.testing import faults

SHARDED = json.dumps({"strategy": "sharded", "shard_copy": False})
COPIED = json.dumps({"strategy": "sharded"})  # an elastic run keeps copies
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


EPOCHS = """
import scripted

session = scripted.begin()
for epoch in session.epochs(3):
    for batch in session.batches(epochs=1):
        scripted.say(session, session.step(batch))
scripted.end(session)
"""


@pytest.mark.slow
def test_a_joiner_gets_a_checkpoint_of_an_earlier_epoch(run: Run, undisturbed: Any) -> None:
    """The others have compared their states at the end of that epoch and do not wait for it there."""
    ran = run(EPOCHS, *TWO, "--standby", 1, *EVERY_3, faults=faults.kill(rank=1, step=4), GIVEN=SHARDED)
    assert ran.code == 0, ran.report()
    assert {one["fingerprint"] for one in ran.printed()} == {undisturbed(EPOCHS)["fingerprint"]}, ran.report()
    assert set(went_back(ran)) == {3}, ran.report()


# Each strategy tells whether its worker shares the weights with the others.
TELLING = """
import json
from paceline.strategies.sharded import prepared

share, shared = prepared.share_weights, []
def told(*given):
    weights = share(*given)
    shared.append(weights is not None)
    return weights
prepared.share_weights = told
"""


def test_the_workers_that_are_left_share_their_weights(run: Run, undisturbed: Any) -> None:
    """Nothing of the interrupted step is taken for a view of the weights that the script has made."""
    script = TELLING + PLAIN + "print(json.dumps({'shared': shared}))\n"
    ran = run(script, *ELASTIC, *EVERY_3, faults=faults.kill(rank=1, step=5), GIVEN=SHARDED)
    assert ran.code == 0, ran.report()
    shared = [one["shared"] for one in ran.printed() if "shared" in one]
    assert max(map(len, shared)) > 1, ran.report()
    assert all(map(all, shared)), ran.report()
    fingerprints = {one["fingerprint"] for one in ran.printed() if "fingerprint" in one}
    assert fingerprints == {undisturbed(PLAIN)["fingerprint"]}, ran.report()


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
from paceline.step.divided.tensors import Division

put_together, calls = Division.put_together, []
def put(division, *given):
    calls.append(division)
    if os.environ.get("PACELINE_WORKER") == "1" and len(calls) == NTH and "ALONE" not in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    yield from put_together(division, *given)
Division.put_together = put
"""


@pytest.mark.parametrize("way", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_a_worker_is_lost_while_the_state_is_sent_for_a_save(run: Run, undisturbed: Any, way: str) -> None:
    """The save is given up: it begins again after the workers have gone back to the earlier one."""
    every = "--set", "checkpoint.every=3", "--set", f"checkpoint.background={way}"
    ran = run(KILLED.replace("NTH", "2") + PLAIN, *ELASTIC, *every, GIVEN=SHARDED)
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


EVALUATED = PLAIN.replace(
    "scripted.end",
    """    if batch.step == 4:
        scripted.leave(session, batch, 1, 4)
        session.evaluate(images(70))
scripted.end""",
).replace("import scripted", "import scripted\nfrom subjects import images")


def test_a_worker_is_told_to_leave_in_an_evaluation(run: Run, undisturbed: Any) -> None:
    """Its share is handed over, which the evaluation itself does not need."""
    ran = run(EVALUATED, *ELASTIC, GIVEN=SHARDED)
    check(ran, undisturbed(PLAIN), 2)
    assert ran.memberships() == [[0, 1, 2], [0, 2]]


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


POINTS = ["after update", "between reduction and update", "inside the collective", "before forward"]


@pytest.mark.sampled(1)
@PATHS
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("point", POINTS)
def test_a_copy_replaces_a_lost_shard(run: Run, undisturbed: Any, path: str, victim: int, point: Any) -> None:
    script = PLAIN if path == "memory" else OVER_THE_NETWORK + PLAIN
    ran = run(script, *ELASTIC, faults=faults.kill(rank=victim, step=5, point=point), GIVEN=COPIED)
    check(ran, undisturbed(PLAIN), 2)
    assert not went_back(ran), ran.report()


# The script looks at the weights after each step.
SEEN = PLAIN.replace(
    "scripted.end(session)",
    """    weights = session._context.compute.model.parameters()
    values.append(sum(value.detach().double().sum().item() for value in weights).hex())
scripted.end(session, values=values)""",
).replace("for batch", "values = []\nfor batch")

# Worker 2 dies when it has made the update. Of the others, only those in HEARD have got the norms of all.
UNDECIDED = """
import os, time
from paceline.errors import WorkerLost
from paceline.strategies.data_parallel.reducer import Reducer

norm_of, calls = Reducer.norm_of, []
def norm(reducer, *given):
    calls.append(reducer)
    worker, found = int(os.environ["PACELINE_WORKER"]), norm_of(reducer, *given)
    if len(calls) == 6 and worker != 2:
        while not reducer._context.world.alarmed:
            time.sleep(0.01)
        if worker not in HEARD:
            raise WorkerLost("another worker was lost", (2,))
    return found
Reducer.norm_of = norm
"""


@pytest.mark.sampled(1)
@PATHS
@pytest.mark.parametrize("heard", [(0,), (1,), (), (0, 1)], ids=str)
def test_some_do_not_know_whether_a_step_was_done(run: Run, undisturbed: Any, path: str, heard: Any) -> None:
    """They make the update that others have made, or nobody does; what the lost worker has written does not count."""
    script = UNDECIDED.replace("HEARD", str(heard)) + SEEN
    killed = faults.kill(rank=2, step=5, point="after update")
    ran = run(script if path == "memory" else OVER_THE_NETWORK + script, *ELASTIC, faults=killed, GIVEN=COPIED)
    check(ran, undisturbed(SEEN), 2)
    assert not went_back(ran), ran.report()
