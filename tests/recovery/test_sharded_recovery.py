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


def checked(ran: Ran, wanted: dict[str, Any]) -> list[int]:
    """The steps to which the workers of a run went back, which has ended with the state of an undisturbed one."""
    assert ran.code == 0, ran.report()
    assert {one["fingerprint"] for one in ran.printed()} == {wanted["fingerprint"]}, ran.report()
    return went_back(ran)


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
    assert set(checked(ran, undisturbed(EPOCHS))) == {3}, ran.report()


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


@pytest.mark.sampled(1)
@PATHS
def test_a_lost_shard_comes_from_the_checkpoint(run: Run, undisturbed: Any, path: str) -> None:
    """The workers that are left share weights: nothing of the interrupted step is taken for a view of the script."""
    script = OVER_THE_NETWORK * (path == "network") + TELLING + PLAIN + "print(json.dumps({'shared': shared}))\n"
    ran = run(script, *ELASTIC, *EVERY_3, faults=faults.kill(rank=1, step=5), GIVEN=SHARDED)
    assert ran.code == 0, ran.report()
    assert went_back(ran) == [3, 3], ran.report()
    fingerprints = {one["fingerprint"] for one in ran.printed() if "fingerprint" in one}
    assert fingerprints == {undisturbed(PLAIN)["fingerprint"]}, ran.report()
    shared = [one["shared"] for one in ran.printed() if "shared" in one]
    assert max(map(len, shared)) > 1, ran.report()
    assert path == "network" or all(map(all, shared)), ran.report()


@pytest.mark.slow
@pytest.mark.parametrize("point", ["inside the collective", "between reduction and update", "after update"])
def test_a_worker_is_lost_inside_a_step(run: Run, undisturbed: Any, point: Any) -> None:
    """Some workers may have made the update, and others not."""
    ran = run(PLAIN, *ELASTIC, *EVERY_3, faults=faults.kill(rank=2, step=5, point=point), GIVEN=SHARDED)
    assert checked(ran, undisturbed(PLAIN)) == [3, 3], ran.report()


# Worker 1 is killed when it is to send its slices for the second time.
KILLED = """
import os, signal
from paceline.step.divided.tensors import Division

put_together, calls = Division.put_together, []
def put(division, *given):
    calls.append(division)
    if os.environ.get("PACELINE_WORKER") == "1" and len(calls) == 2 and "ALONE" not in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    yield from put_together(division, *given)
Division.put_together = put
"""

# Worker 1 is killed when it moves slices for the first time.
KILLED_MOVING = """
import os, signal
from paceline.step.divided.moves import _Transfer

run = _Transfer.run
def moving(transfer, moves):
    if os.environ.get("PACELINE_WORKER") == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    run(transfer, moves)
_Transfer.run = moving
"""


@pytest.mark.parametrize("way", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_a_worker_is_lost_while_the_state_is_sent_for_a_save(run: Run, undisturbed: Any, way: str) -> None:
    """The save is given up: it begins again after the workers have gone back to the earlier one."""
    every = "--set", "checkpoint.every=3", "--set", f"checkpoint.background={way}"
    ran = run(KILLED + PLAIN, *ELASTIC, *every, GIVEN=SHARDED)
    assert checked(ran, undisturbed(PLAIN)) == [3, 3], ran.report()


@pytest.mark.slow
def test_a_worker_is_lost_while_another_one_hands_over_its_slices(run: Run, undisturbed: Any) -> None:
    script = PLAIN.replace("    scripted.say", "    scripted.leave(session, batch, 2, 4)\n    scripted.say")
    ran = run(KILLED_MOVING + script, *ELASTIC, *EVERY_3, GIVEN=SHARDED)
    assert set(checked(ran, undisturbed(PLAIN))) == {3}, ran.report()


EVALUATED = PLAIN.replace("import scripted", "import scripted\nfrom subjects import images").replace(
    "scripted.end", "scripted.leave(session, batch, 1, 11)\nsession.evaluate(images(70))\nscripted.end"
)


def test_a_worker_is_told_to_leave_in_an_evaluation(run: Run, undisturbed: Any) -> None:
    """Its share is handed over, which the evaluation itself does not need, and hashed again."""
    ran = run(EVALUATED, *ELASTIC, GIVEN=SHARDED)
    check(ran, undisturbed(PLAIN), 2)
    assert ran.memberships() == [[0, 1, 2], [0, 2]]


@pytest.mark.slow
def test_a_worker_is_replaced_in_the_last_evaluation(run: Run, undisturbed: Any) -> None:
    """The new worker repeats lost steps in its loop, the other one before its evaluation: then both hash the shares."""
    every, script = ("--set", "checkpoint.every=5"), EVALUATED.replace("scripted.leave(session, batch, 1, 11)", "")
    lost = faults.kill(rank=1, step=12, point="in evaluate")
    ran = run(script, *TWO, "--standby", 1, *every, faults=lost, GIVEN=SHARDED)
    assert ran.code == 0, ran.report()
    assert {one["fingerprint"] for one in ran.printed()} == {undisturbed(PLAIN)["fingerprint"]}, ran.report()
    assert set(went_back(ran)) == {10}, ran.report()


def test_a_worker_that_is_told_to_leave(run: Run, undisturbed: Any) -> None:
    script = PLAIN.replace("    scripted.say", "    scripted.leave(session, batch, 1, 4)\n    scripted.say")
    ran = run(script, *ELASTIC, GIVEN=SHARDED)
    check(ran, undisturbed(PLAIN), 2)
    assert ran.memberships() == [[0, 1, 2], [0, 2]]


@pytest.mark.sampled(1)
@PATHS
def test_a_standby_takes_the_place_of_a_worker_that_leaves(run: Run, undisturbed: Any, path: str) -> None:
    leaves = "    scripted.leave(session, batch, 1 if os.environ['PACELINE_WORKER'] == '1' else 9, 4)\n    scripted.say"
    script = "import os\nimport scripted\nscripted.hold_back(3, 'membership', 2)\n"
    script += PLAIN.replace("    scripted.say", leaves)
    ran = run(OVER_THE_NETWORK * (path == "network") + script, *TWO, "--standby", 1, GIVEN=SHARDED)
    check(ran, undisturbed(PLAIN), 2)
    assert ran.memberships()[:2] == [[0, 1], [0, 2]], ran.report()


POINTS = ["after update", "between reduction and update", "inside the collective", "before forward"]


# No worker puts the state together.
DIVIDED = """
from paceline.strategies.sharded import strategy
from paceline.training.recovery import state_shards

def refused(*given):
    raise AssertionError("the state stays divided")
strategy.consolidate_state_dict = state_shards.consolidate_state_dict = refused
"""


@pytest.mark.sampled(1, turns=6)
@PATHS
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("point", POINTS)
def test_a_copy_replaces_a_lost_shard(run: Run, undisturbed: Any, path: str, victim: int, point: Any) -> None:
    """The checkpoint of the step before is complete, or begun again."""
    script = DIVIDED + (PLAIN if path == "memory" else OVER_THE_NETWORK + PLAIN)
    ran = run(script, *ELASTIC, *EVERY_3, faults=faults.kill(rank=victim, step=6, point=point), GIVEN=COPIED)
    check(ran, undisturbed(PLAIN), 2)
    assert not went_back(ran), ran.report()


@pytest.mark.slow
@PATHS
@pytest.mark.parametrize(("step", "point"), [(6, "before forward"), (5, "after update")])
def test_a_worker_joins_at_once_when_another_one_is_lost(
    run: Run, undisturbed: Any, path: str, step: int, point: Any
) -> None:
    """It sends its new share for the checkpoint of the step before, too, if that is begun again, or not yet begun."""
    script = DIVIDED + (PLAIN if path == "memory" else OVER_THE_NETWORK + PLAIN)
    given = "-n", 3, "--elastic", "3:3", "--standby", 1, *EVERY_3
    ran = run(script, *given, faults=faults.kill(rank=0, step=step, point=point), GIVEN=COPIED)
    check(ran, undisturbed(PLAIN), 3)
    assert ran.memberships()[:2] == [[0, 1, 2], [1, 2, 3]] and not went_back(ran), ran.report()


# When rank 0 has saved step 5, worker 2 is killed, and worker 1 is interrupted before it knows.
SAVED = """
import os, signal, time
from paceline.errors import WorkerLost
from paceline.step.divided.optimizer_state import DividedOptimizerState

send, calls = DividedOptimizerState.send, []
def sent(divided):
    send(divided)
    calls.append(divided)
    if len(calls) == 5 and os.environ["PACELINE_WORKER"] == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    if len(calls) == 5 and os.environ["PACELINE_WORKER"] == "1":
        while not divided._world.alarmed:
            time.sleep(0.01)
        raise WorkerLost("another worker was lost", (2,))
DividedOptimizerState.send = sent
"""


def test_a_save_that_rank_0_has_made_is_not_made_again(run: Run, undisturbed: Any) -> None:
    script = PLAIN.replace("scripted.end(", "    if 'ALONE' not in os.environ:\n        session.save()\nscripted.end(")
    ran = run(SAVED + script, *ELASTIC, GIVEN=COPIED)
    check(ran, undisturbed(PLAIN), 2)
    assert not went_back(ran), ran.report()


# Worker 3 is killed when all have their new shares, which worker 0 does not know.
ALL_MOVED = """
import os, signal
from paceline.errors import WorkerLost
from paceline.training.recovery.recovery import Recovery

drop, worker, moved = Recovery._drop_old_share, os.environ.get("PACELINE_WORKER"), []
def dropped(recovery):
    held = recovery._context.held
    names, tensors = set(held.names), dict(held.tensors)
    drop(recovery)
    if worker == "3":
        os.kill(os.getpid(), signal.SIGKILL)
    if worker == "0" and not moved:
        moved.append(1)
        held.add(names, tensors)
        recovery._interrupted = WorkerLost("another worker was lost", (2,))
Recovery._drop_old_share = dropped
"""

# Worker 1 is killed when worker 0 has its new share, and worker 2 has nothing of its own.
SOME_MOVED = """
import os, signal, time
from pathlib import Path
from paceline.errors import WorkerLost
from paceline.step.divided.moves import _Transfer
from paceline.training.recovery.recovery import Recovery

drop, run, worker, moved = Recovery._drop_old_share, _Transfer.run, os.environ.get("PACELINE_WORKER"), []
mark = Path(os.environ["PACELINE_RUN"]) / "moved"
def dropped(recovery):
    if worker == "0":
        mark.touch()
    while worker == "1":
        if mark.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
    drop(recovery)
def moving(transfer, moves):
    if worker != "2" or moved:
        return run(transfer, moves)
    moved.append(1)
    transfer._unpack = lambda *given: None
    run(transfer, [move for move in moves if not move.is_local])
    raise WorkerLost("another worker was lost", ())
Recovery._drop_old_share, _Transfer.run = dropped, moving
"""


@pytest.mark.slow
@PATHS
@pytest.mark.parametrize(("moved", "first"), [(ALL_MOVED, 2), (SOME_MOVED, 3)], ids=["all", "some"])
def test_another_worker_is_lost_while_slices_move(
    run: Run, undisturbed: Any, path: str, moved: str, first: int
) -> None:
    """Some hold their new shares only, some their old ones only, and some both."""
    script = DIVIDED + moved + PLAIN
    script = script if path == "memory" else OVER_THE_NETWORK + script
    ran = run(script, "-n", 4, "--elastic", "2:4", faults=faults.kill(rank=first, step=5), GIVEN=COPIED)
    check(ran, undisturbed(PLAIN), 2)
    assert not went_back(ran), ran.report()


@pytest.mark.sampled(1)
@PATHS
def test_one_worker_is_left_until_another_one_joins(run: Run, undisturbed: Any, path: str) -> None:
    """It puts its slices and its copies together, and gives the joiner a share."""
    script = "import scripted\nscripted.hold_back(2, 'membership', 2)\n" + PLAIN
    script = script if path == "memory" else OVER_THE_NETWORK + script
    ran = run(script, "-n", 2, "--elastic", "1:2", faults=faults.kill(rank=1, step=3), GIVEN=COPIED)
    check(ran, undisturbed(PLAIN), 1)
    assert ran.memberships()[:2] == [[0, 1], [0]] and not went_back(ran), ran.report()


# Worker 0 and worker 1 are on one machine, the others on another one.
MACHINES = """
import os, platform
platform.node = lambda: f"machine {int(os.environ['PACELINE_WORKER']) // 2 % 2}"
"""


@pytest.mark.slow
@pytest.mark.parametrize("within", [None, "machine"])
def test_a_worker_of_one_of_two_machines_is_lost(run: Run, undisturbed: Any, within: str | None) -> None:
    """The weights of each machine come from workers of both."""
    given = json.dumps({"strategy": "sharded", "shard_within": within})
    killed = faults.kill(rank=2, step=5, point="between reduction and update")
    ran = run(DIVIDED + MACHINES + PLAIN, "-n", 4, "--elastic", "2:4", faults=killed, GIVEN=given)
    check(ran, undisturbed(PLAIN), 3)
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
from paceline.strategies.data_parallel.norms import GlobalNorm

norm_of, calls = GlobalNorm.of, []
def norm(one, *given):
    calls.append(one)
    worker, found = int(os.environ["PACELINE_WORKER"]), norm_of(one, *given)
    if len(calls) == 6 and worker != 2:
        while not one._world.alarmed:
            time.sleep(0.01)
        if worker not in HEARD:
            raise WorkerLost("another worker was lost", (2,))
    return found
GlobalNorm.of = norm
"""


@pytest.mark.sampled(1, turns=6)
@PATHS
@pytest.mark.parametrize("wire", ["float32", "int8"])
@pytest.mark.parametrize("heard", [(0,), (1,), (), (0, 1)], ids=str)
def test_some_do_not_know_whether_a_step_was_done(run: Run, undisturbed: Any, path: str, heard: Any, wire: str) -> None:
    """They make the update that others have made, or nobody does; what the lost worker has written does not count."""
    script, given = UNDECIDED.replace("HEARD", str(heard)) + SEEN, json.dumps({"strategy": "sharded", "wire": wire})
    killed = faults.kill(rank=2, step=5, point="after update")
    ran = run(script if path == "memory" else OVER_THE_NETWORK + script, *ELASTIC, faults=killed, GIVEN=given)
    check(ran, undisturbed(SEEN, GIVEN=json.dumps({"wire": wire})), 2)
    assert not went_back(ran), ran.report()


def resumes(run: Run, undisturbed: Any) -> None:
    checked(run(PLAIN, "-n", 2, "--resume", "auto", GIVEN=SHARDED), undisturbed(PLAIN))


@pytest.mark.slow
@pytest.mark.parametrize("leaving", [1, 2])
def test_too_few_workers_stay(run: Run, undisturbed: Any, leaving: int) -> None:
    """They save together before the run ends."""
    leave = "".join(f"    scripted.leave(session, batch, {rank}, 4)\n" for rank in range(2 - leaving, 2))
    ran = run(DIVIDED + PLAIN.replace("    scripted.say", f"{leave}    scripted.say"), *TWO, GIVEN=SHARDED)
    assert ran.code == 75, ran.report()
    assert ran.saved() == [5] and not [one for one in ran.events() if one["event"] == "not saved"], ran.report()
    resumes(run, undisturbed)


BY_HAND = """
import os
import scripted

session = scripted.begin()
bias = next(reversed([*session._context.compute.model.parameters()]))
for batch in session.batches(steps=12):
    scripted.say(session, session.step(batch))
    if batch.step == 4:
        bias.data.mul_(0.5)
        if "ALONE" not in os.environ:
            session.save()
if "ALONE" not in os.environ:
    session.save()
scripted.end(session)
"""
KEEP = *ELASTIC, "--set", "checkpoint.keep=9"
BEFORE = *KEEP, "--set", "checkpoint.every=5", "--set", "checkpoint.background=true"


@pytest.mark.parametrize(
    ("arguments", "step", "given"),
    [
        (KEEP, 5, "{}"),
        pytest.param(KEEP, 12, COPIED, marks=pytest.mark.slow),
        pytest.param(BEFORE, 5, COPIED, marks=pytest.mark.slow),
    ],
    ids=["allreduce", "sharded, after the last step", "sharded, while another save is written"],
)
def test_rank_0_is_lost_in_a_save_by_hand(run: Run, undisturbed: Any, arguments: Any, step: int, given: str) -> None:
    """The others wait for the save, and another worker writes it, with what the loop has changed since the step.

    That change is not in what a worker could write again of the other save.
    """
    ran = run(BY_HAND, *arguments, faults=faults.kill(rank=0, step=step, point="inside a save"), GIVEN=given)
    check(ran, undisturbed(BY_HAND), 2)
    assert len(list(ran.run.glob(f"checkpoints/step-{step:06}/*/manifest.json"))) == 1, ran.report()
    told = "The checkpoint of step 5 was lost with the worker that wrote it" in ran.report()
    assert told == (arguments is BEFORE), ran.report()


# Each worker tells how many bytes of weights and of the optimizer's state change hands.
MOVED = """
from paceline.step.divided.moves import _Transfer

run = _Transfer.run
def counted(transfer, moves):
    bytes_of = {"parameter": 0, "optimizer": 0}
    for move in moves:
        if not move.is_local:
            bytes_of[move.name.partition("/")[0]] += transfer._bytes_of(move) * len(move.receivers)
    print("moved", *bytes_of.values())
    rank, sent = transfer._world.rank, [move for move in moves if not move.is_local]
    received = [move for move in sent if rank in move.receivers and move.name.startswith("optimizer/")]
    print("received", sum(map(transfer._bytes_of, received)))
    run(transfer, moves)
_Transfer.run = counted
"""


@pytest.mark.slow
@pytest.mark.parametrize(("path", "standby"), [("network", 0), ("memory", 1)])
def test_workers_that_have_all_weights_get_none(run: Run, undisturbed: Any, path: str, standby: int) -> None:
    """Weights go to a worker that joins only. With a standby, so does the optimizer's state: the others keep theirs."""
    alone = "import scripted\nscripted.hold_back(3, 'end')\n" * (not standby)
    script = alone + OVER_THE_NETWORK * (path == "network") + MOVED + PLAIN
    script += "print('size', sum(value.nbytes for value in session._context.compute.model.parameters()))\n"
    given = json.dumps({"strategy": "sharded", "shard": "gradients"})
    arguments = "-n", 3, "--elastic", f"{2 + standby}:3", *(("--standby", 1) if standby else ())
    ran = run(script, *arguments, faults=faults.kill(rank=1, step=5), GIVEN=given)
    check(ran, undisturbed(PLAIN), 2)
    lines = {line for log in ran.logs.values() for line in log.splitlines() if line.startswith(("moved", "size"))}
    (_, weights, moments), (_, size) = map(str.split, sorted(lines))
    assert int(weights) == int(size) * standby and int(moments) > 0, ran.report()
    own = [line.split()[1] for log in ran.logs.values() for line in log.splitlines() if line.startswith("received")]
    assert sum(map(int, own)) == int(moments), ran.report()
    assert sum(number != "0" for number in own) == 1 or not standby, ran.report()


AVERAGED = """
import scripted
from subjects import images

session, values = scripted.begin(average={"kind": "ema", "decay": 0.5}), []
for batch in session.batches(steps=12):
    scripted.say(session, session.step(batch))
    if batch.step in (4, 8):
        with session.averaged():
            values.append(session.evaluate(images(70)).hex())
scripted.end(session, values=values)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("path", "victim"), [("memory", 1), ("network", 0)])
def test_a_worker_is_lost_while_averages_are_evaluated(run: Run, undisturbed: Any, path: str, victim: int) -> None:
    """The others have kept their weights, in whose place the averages were."""
    script = DIVIDED + OVER_THE_NETWORK * (path == "network") + AVERAGED
    ran = run(script, *ELASTIC, faults=faults.kill(rank=victim, step=5, point="in evaluate"), GIVEN=COPIED)
    check(ran, undisturbed(AVERAGED), 2)
    assert not went_back(ran), ran.report()
