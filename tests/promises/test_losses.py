"""Workers are lost at each point of a step, under each strategy: what the pages promise of it holds.

A run of each case has the same script. It trains two epochs, evaluates after each, and keeps values of its own; the
reference is one process to which nothing happens.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from launching import Ran

from paceline.observe import ledger
from paceline.testing import faults

STEPS = 8
SCRIPT = """
import json, os, signal
from pathlib import Path
import scripted
from subjects import CASES, images

happens = json.loads(os.environ.get("HAPPENS", "{}"))
run, number = Path(os.environ["PACELINE_RUN"]), int(os.environ["PACELINE_WORKER"])
(run / f"pid-{number}").write_text(str(os.getpid()))
case, step = CASES["batch norm, dropout, short batch"](), -1
inner = case["loss"]

def loss(output, target):
    if happens.get("forward") == [number, step]:
        os.kill(os.getpid(), signal.SIGKILL)
    return inner(output, target)

session = scripted.begin(loss=loss, checkpoint={"every": 4, "background": False}, timeout_seconds=120)
kept = session.register(seen=[])
values = []

def let_go_on(stopped):
    '''Wake a stopped worker when the others have dropped it.'''
    if number == 0:
        scripted.wait_until(lambda: scripted._recorded("lost"), "the loss")
        os.kill(int((run / f"pid-{stopped}").read_text()), signal.SIGCONT)

def kill(members):
    '''Kill some at once: one that comes to the step later would go on with others.'''
    processes = [member.pid for member in members if member.pid != os.getpid()]
    for each in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            os.kill(process, each)
    if len(members) > len(processes):
        os.kill(os.getpid(), signal.SIGKILL)

for epoch in session.epochs(2):
    for batch in session.batches():
        step, world = batch.step, session._context.world
        if happens.get("wake", [None])[0] == step:
            let_go_on(happens["wake"][1])
        if happens.get("join") == step:
            scripted.await_joiner(session)
        if "leave" in happens:
            scripted.leave(session, batch, *happens["leave"])
        if "end" in happens:
            scripted.end_launcher(session, batch, happens["end"])
        first = (session.rank, world.generation) == (0, 0) and "ALONE" not in os.environ
        if happens.get("kill", [None])[0] == step and first:
            kill([world.coordinator._members[rank] for rank in happens["kill"][1]])
        report = session.step(batch)
        scripted.say(session, report)
        kept.seen.append(report.step)
    values.append(session.evaluate(images(40)).hex())
scripted.end(session, values=values, seen=kept.seen)
"""
NETWORK = """
import paceline.comm.shm.arena, paceline.training.recovery.formation
paceline.training.recovery.formation.can_share = lambda: False
"""
TWO_MACHINES = """
import os
from paceline.comm.rendezvous.coordinator_client import CoordinatorClient

def register(client, about, *more, inner=CoordinatorClient.register):
    inner(client, about | {"host": f"machine-{int(os.environ['PACELINE_WORKER']) // 2}"}, *more)

CoordinatorClient.register = register
"""
THREE = "import scripted\nscripted.hold_back(3, 'end')\n" + SCRIPT
FOUR = "import scripted\nscripted.hold_back(4, 'end')\n" + SCRIPT
"""No other worker comes before the end of the run."""

ELASTIC = "-n", 3, "--elastic", "1:3"
FIXED = {"exact": "fixed-point"}


def given(happens: dict[str, Any] | None = None, **settings: Any) -> dict[str, str]:
    """Return the variables for a script: what happens in it, and its settings."""
    return {"HAPPENS": json.dumps(happens or {}), "GIVEN": json.dumps(settings)}


def check(ran: Ran, wanted: dict[str, Any], finishers: int = 2) -> Ran:
    """Check that the run did each step and used each sample once, and ended with the bits of one process."""
    ran.check_steps(STEPS)
    assert all(one["seen"] == list(range(STEPS)) for one in ran.printed()), ran.report()
    return check_bits(ran, wanted, finishers)


def check_bits(ran: Ran, wanted: dict[str, Any], finishers: int) -> Ran:
    """Check that so many workers or more ended with the state and the evaluations of one process."""
    assert ran.code == 0, ran.report()
    assert ledger.check(ledger.read(ran.run / "events"), STEPS) == [], ran.report()
    found = ran.printed()
    assert len(found) >= finishers, ran.report()
    for one in found:
        assert one["fingerprint"] == wanted["fingerprint"], ran.report()
        values = one["values"]  # a joiner has missed the first ones
        assert values and values == wanted["values"][len(wanted["values"]) - len(values) :], ran.report()
    return ran


def went_back(ran: Ran) -> set[int]:
    """Return the steps of the checkpoints to which the workers of a run went back."""
    return {one["step"] for one in ran.events() if one["event"] == "went back"}


@pytest.fixture(scope="module")
def wanted(undisturbed: Any) -> dict[str, Any]:
    """What one process computes with ``exact=True``."""
    return undisturbed(SCRIPT)


@pytest.fixture(scope="module")
def fixed(undisturbed: Any) -> dict[str, Any]:
    """What one process computes with ``exact="fixed-point"``."""
    return undisturbed(SCRIPT, **given(**FIXED))


# shared memory, the network, and both


@pytest.mark.promise(
    "docs/guarantees.md", "**No step is lost, and none is applied twice,** as long as one training worker survives."
)
def test_two_of_three_are_killed_at_once(launched: Any, wanted: Any) -> None:
    check(launched(THREE, *ELASTIC, **given({"kill": [5, [0, 2]]})), wanted, 1)


@pytest.mark.promise(
    "README.md", "the others keep their processes and their state, divide the step again, and repeat it."
)
def test_a_kill_in_a_forward_pass(launched: Any, wanted: Any) -> None:
    ran = check(launched(THREE, *ELASTIC, **given({"forward": [0, 5]})), wanted)
    assert ran.memberships() == [[0, 1, 2], [1, 2]], ran.report()


@pytest.mark.promise(
    "docs/guarantees.md",
    "**With `exact=True` the result has the same bits** as if nothing had happened: whichever workers were lost",
    "But a worker may be lost when some of the others have made the update already, and some have not.",
)
def test_kills_inside_a_collective_and_after_the_update_over_the_network(launched: Any, wanted: Any) -> None:
    plan = faults.kill(rank=2, step=5, point="inside the collective")
    plan += faults.kill(rank=0, step=6, point="after update")
    check(launched(NETWORK + THREE, *ELASTIC, faults=plan, **given()), wanted, 1)


@pytest.mark.promise("docs/guarantees.md", "**Every sample of an epoch is used exactly once.**")
@pytest.mark.promise("docs/survive.md", "is killed, crashes, or ends itself without an exception")
def test_an_exit_in_the_loader_and_a_kill_before_the_update_on_two_machines(launched: Any, wanted: Any) -> None:
    plan = faults.exit(rank=3, step=4, point="in the loader", code=7)
    plan += faults.kill(rank=1, step=6, point="between reduction and update")
    ran = check(launched(TWO_MACHINES + FOUR, "-n", 4, "--elastic", "1:4", faults=plan, **given()), wanted)
    assert "ended" in ran.launcher("lost")[0]["reason"], ran.report()


@pytest.mark.promise("docs/guarantees.md", "**Evaluations give one value.** An evaluation under way is repeated")
@pytest.mark.promise("docs/checkpoint-files.md", "A kill at any moment leaves the earlier checkpoints as they were")
def test_kills_in_an_evaluation_and_inside_a_save(launched: Any, wanted: Any) -> None:
    plan = faults.kill(rank=0, step=4, point="in evaluate") + faults.kill(rank=0, step=8, point="inside a save")
    ran = check(launched(THREE, *ELASTIC, faults=plan, **given()), wanted, 1)
    assert 4 in ran.saved() and len(ran.launcher("lost")) == 2, ran.report()


# joining, leaving, hanging


@pytest.mark.promise(
    "docs/guarantees.md", "**With `exact=True` the result has the same bits**", "or joined, at any moment."
)
@pytest.mark.promise(
    "docs/survive.md",
    "The others repeat the step without it. A standby takes its place at once; without one, a new process "
    "does within a second",
)
def test_a_kill_while_another_one_joins(launched: Any, wanted: Any) -> None:
    """The worker that leads the recovery is killed in it."""
    plan = faults.kill(rank=2, step=2) + faults.kill(rank=0, step=3, point="during recovery")
    script = "import scripted\nscripted.hold_back(3, 'membership', 2)\n" + SCRIPT
    ran = check(launched(script, *ELASTIC, faults=plan, **given({"join": 5})), wanted)
    assert len(ran.launcher("lost")) == 2 and 3 in ran.memberships()[-1], ran.report()


@pytest.mark.promise("docs/survive.md", "The others finish their step, and let it in. It gets the state of one of them")
def test_a_kill_while_the_state_is_sent(launched: Any, wanted: Any) -> None:
    plan = faults.kill(rank=2, step=2) + faults.kill(rank=1, step=0, point="sending the state")
    ran = check(launched(NETWORK + SCRIPT, *ELASTIC, faults=plan, **given({"join": 5})), wanted)
    assert len(ran.launcher("lost")) == 2 and 3 in ran.memberships()[-1], ran.report()


@pytest.mark.promise("docs/checkpoints.md", "Joining workers get them, too.")
def test_a_standby_takes_the_place(launched: Any, wanted: Any) -> None:
    """The standby has the registered values of the others."""
    words = "-n", 2, "--elastic", "2:2", "--standby", 1
    script = "import scripted\nscripted.hold_back(3, 'membership', 2)\n" + SCRIPT
    ran = check(launched(script, *words, faults=faults.kill(rank=1, step=5), **given()), wanted)
    assert ran.memberships()[:2] == [[0, 1], [0, 2]], ran.report()


@pytest.mark.promise("docs/survive.md", "it finishes its step and leaves, with exit code 75; the others continue.")
def test_sigterm_to_a_worker(launched: Any, wanted: Any) -> None:
    ran = check(launched(THREE, *ELASTIC, **given({"leave": [1, 4]})), wanted)
    assert ran.memberships() == [[0, 1, 2], [0, 2]] and not ran.launcher("lost"), ran.report()
    assert [one["code"] for one in ran.events() if one["event"] == "departure"][:1] == [75], ran.report()


@pytest.mark.promise(
    "docs/survive.md",
    "all its workers finish their step. One of them saves a checkpoint. The exit code is 75",
    "Exit code 75 means: resume me. Start the same command again with `--resume auto`.",
)
def test_sigterm_to_the_launcher(launched: Any, wanted: Any) -> None:
    """The resumed run has another number of workers."""
    ended = launched(SCRIPT, *ELASTIC, **given({"end": 5}))
    assert ended.code == 75, ended.report()
    assert [step for step in ended.saved() if step > 4] in ([6], [7]), ended.report()
    again = launched(SCRIPT, "-n", 2, "--resume", "auto", after=ended, **given())
    assert again.code == 0, again.report()
    assert [one["fingerprint"] for one in again.printed()] == [wanted["fingerprint"]] * 2, again.report()
    assert [one["seen"] for one in again.printed()] == [list(range(STEPS))] * 2, again.report()


@pytest.fixture(scope="module")
def hung(launched: Any) -> Ran:
    """A worker is stopped until the others have dropped it. Nothing but a stopped process is silent for so long."""
    how = given({"wake": [6, 1], "join": 6}, hang_seconds=20)
    return launched(SCRIPT, *ELASTIC, faults=faults.stop(rank=1, step=3), **how)


@pytest.mark.promise(
    "docs/survive.md",
    "It is named, and dropped. The others continue. When it comes back, it joins again",
)
def test_a_worker_that_hangs(hung: Ran) -> None:
    (lost,) = hung.launcher("lost")
    assert "rank 1" in lost["reason"] and "late" in lost["reason"], hung.report()
    assert [sorted(members) for members in hung.memberships()] == [[0, 1, 2], [0, 2], [0, 1, 2]], hung.report()


@pytest.mark.promise("docs/survive.md", "joins again, with the state of the others, at its place in the script.")
def test_a_worker_that_comes_back(hung: Ran, wanted: Any) -> None:
    check_bits(hung, wanted, 3)
    assert hung.steps("rank-1")[:3] == [0, 1, 2] and hung.steps("rank-1")[-1] == STEPS - 1, hung.report()


@pytest.mark.promise(
    "docs/survive.md",
    "When others wait for a worker for too long, the launcher reports what every worker does",
    "rank 0 has waited 30 s in the",
)
def test_a_report_of_a_worker_that_hangs(hung: Ran) -> None:
    said = r"still waiting: ranks 0, 2 have waited \d+ s in the .* at step 3; rank 1 has not responded for \d+ s"
    assert re.search(said, hung.said), hung.report()


@pytest.mark.promise("docs/guarantees.md", "If all are lost at once, training continues from a checkpoint.")
@pytest.mark.promise("docs/survive.md", "the new processes then continue from the newest one.")
def test_all_are_killed_at_once(launched: Any, wanted: Any) -> None:
    ran = launched(SCRIPT, *ELASTIC, **given({"kill": [6, [0, 1, 2]]}))
    assert ran.code == 0, ran.report()
    assert {one["fingerprint"] for one in ran.printed()} == {wanted["fingerprint"]}, ran.report()
    assert {one["step"] for one in ran.events() if one["event"] == "resume"} == {4}, ran.report()


# other sums


@pytest.mark.promise("docs/exact.md", "The bounds are saved in checkpoints and sent to workers that join.")
def test_fixed_point_and_a_joiner(launched: Any, fixed: Any) -> None:
    plan = faults.kill(rank=1, step=2, point="between reduction and update")
    check(launched(SCRIPT, *ELASTIC, faults=plan, **given({"join": 5}, **FIXED)), fixed, 3)


@pytest.mark.promise("docs/exact.md", "they compute its gradients again in units that fit, and the step counts once.")
def test_fixed_point_and_a_kill_in_the_step_that_is_repeated(launched: Any, fixed: Any) -> None:
    plan = faults.kill(rank=1, step=0, point="inside the collective")
    ran = check(launched(NETWORK + THREE, *ELASTIC, faults=plan, **given(**FIXED)), fixed)
    assert [one for one in ran.events() if one["event"] == "repeated"], ran.report()


@pytest.mark.promise(
    "docs/exact.md",
    'and the back end\'s own (`reduction="collective"`)',
    "any all-reduce gives the same bits: shared memory, the network",
)
def test_collectives_of_the_back_end_and_kills(launched: Any, fixed: Any) -> None:
    plan = faults.kill(rank=0, step=4, point="in evaluate")
    plan += faults.kill(rank=1, step=5, point="inside the collective")
    ran = check(launched(THREE, *ELASTIC, faults=plan, **given(reduction="collective", **FIXED)), fixed, 1)
    assert len(ran.launcher("lost")) == 2, ran.report()


# other strategies with the same bits


@pytest.mark.promise(
    "docs/stealing.md",
    "When a worker is lost, its leases are lost with it: the others [repeat](survive.md) the step, with all "
    "microbatches free again.",
)
def test_stealing_and_a_kill_in_a_forward_pass(launched: Any, wanted: Any) -> None:
    check(launched(THREE, *ELASTIC, **given({"forward": [1, 5]}, strategy="stealing")), wanted)


@pytest.mark.promise("docs/stealing.md", "With `exact=True` the bits are those of `allreduce`, and of one process.")
def test_stealing_over_the_network_and_a_kill_after_the_update(launched: Any, wanted: Any) -> None:
    """Rank 0 counts who has which microbatch."""
    plan = faults.kill(rank=0, step=5, point="after update")
    check(launched(NETWORK + THREE, *ELASTIC, faults=plan, **given(strategy="stealing")), wanted)


@pytest.mark.promise("docs/stealing.md", '`strategy="auto"` starts with `allreduce` and measures.')
def test_auto_and_a_kill(launched: Any, wanted: Any) -> None:
    plan = faults.kill(rank=2, step=3, point="in the loader")
    check(launched(THREE, *ELASTIC, faults=plan, **given(strategy="auto")), wanted)


PIPELINE = {"strategy": "pipeline", "microbatches": 8}


@pytest.mark.promise(
    "docs/pipeline.md",
    "If another worker holds the lost worker's stage, the others continue from the step in progress.",
)
def test_a_stage_that_two_workers_hold(launched: Any, wanted: Any) -> None:
    plan = faults.kill(rank=0, step=5, point="inside the collective")
    words = "-n", 4, "--elastic", "2:4", "--set", "pipeline.stages=2"
    ran = check(launched(FOUR, *words, faults=plan, **given(**PIPELINE)), wanted, 3)
    assert not went_back(ran), ran.report()


@pytest.mark.promise(
    "docs/pipeline.md",
    "If not, all return to the last checkpoint (`checkpoint.every`), cut the model again for the remaining workers, "
    "and repeat the steps since, without the script noticing: with `exact` the final bits are those of an undisturbed "
    "run",
)
def test_a_stage_that_nobody_else_holds(launched: Any, wanted: Any) -> None:
    plan = faults.kill(rank=0, step=6, point="in the loader")
    ran = check(launched(THREE, "-n", 3, "--elastic", "2:3", faults=plan, **given(**PIPELINE)), wanted)
    assert went_back(ran) == {4}, ran.report()


@pytest.mark.promise(
    "docs/pipeline.md", "Before a worker leaves on request, all workers get the whole state, so nothing is lost"
)
def test_a_stage_whose_worker_leaves(launched: Any, wanted: Any) -> None:
    ran = check(launched(THREE, "-n", 3, "--elastic", "2:3", **given({"leave": [1, 5]}, **PIPELINE)), wanted)
    assert not went_back(ran) and ran.memberships() == [[0, 1, 2], [0, 2]], ran.report()


SERVER = {"strategy": "parameter-server"}


@pytest.mark.promise(
    "docs/asynchronous.md", "Mode `sync` with `exact=True` gives the bits of all-reduce and of one process"
)
def test_a_server_is_killed_after_its_update(launched: Any, wanted: Any) -> None:
    plan = faults.kill(rank=0, step=5, point="after update")
    check(launched(THREE, *ELASTIC, faults=plan, **given(**SERVER)), wanted)


@pytest.mark.promise(
    "docs/asynchronous.md",
    "On several machines the survivors read each shard, and the table of steps, from the worker that holds it or from "
    "the one with its copy",
)
def test_a_server_on_the_network_is_killed(launched: Any, wanted: Any) -> None:
    plan = faults.kill(rank=1, step=4, point="between reduction and update")
    ran = check(launched(NETWORK + THREE, *ELASTIC, faults=plan, **given(server={"count": 2}, **SERVER)), wanted)
    assert not went_back(ran), ran.report()
