"""A worker is lost where a wait neither blocks nor raises, as on NCCL: nobody updates from what has not come."""

from typing import Any

import pytest
from launching import Ran, Run

from paceline.testing import faults
from paceline.testing.faults import Point

STEPS = 8
SCRIPT = f"""
import os
import scripted
import ordered_transport

if "ALONE" not in os.environ:
    ordered_transport.use()
session = scripted.begin("mlp, momentum")
for batch in session.batches(steps={STEPS}):
    scripted.say(session, session.step(batch))
scripted.end(session)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", ["before forward", "inside the collective", "between reduction and update", "after update"]
)
def test_a_kill(run: Run, undisturbed: Any, point: Point) -> None:
    """Of a model without buffers nothing comes from the others between the means of the gradients and the update."""
    ran = run(SCRIPT, "-n", 3, "--elastic", "1:3", faults=faults.kill(rank=1, step=4, point=point))
    check(ran, undisturbed(SCRIPT))


def check(ran: Ran, alone: dict[str, Any]) -> None:
    assert ran.code == 0, ran.report()
    assert len(ran.printed()) >= 2, ran.report()
    assert {one["fingerprint"] for one in ran.printed()} == {alone["fingerprint"]}, ran.report()


# Rank 1 has given all its works, but its device stands still before the last one of a step; then its host is killed.
# The others have heard all from its host that a step tells, and believe that what they wait for has come.
STALLED = f"""
import os
import signal
from pathlib import Path
import scripted
from paceline.comm.world import World
from paceline.step.optimizer import OptimizerStep
import ordered_transport

confirm, norm = World.confirm, OptimizerStep.norm
step, works = map(int, os.environ["STALL"].split())

def stop_before_update(world, number):
    if number == step and world.generation == 0 and world.size > 1:
        place = Path(os.environ["PACELINE_RUN"])
        (place / f"updates-{{world.rank}}").touch()
        if world.rank == 1:
            others = [place / f"updates-{{rank}}" for rank in range(world.size) if rank != 1]
            scripted.wait_until(lambda: all(one.exists() for one in others), "the others")
            os.kill(os.getpid(), signal.SIGKILL)

def norm_on_device(update, *without):  # the first that needs the means, where there are any
    stop_before_update(session._context.world, session.position)
    return norm(update, *without)

def confirm_or_not(world, number):
    if "UNCONFIRMED" not in os.environ:
        confirm(world, number)

World.confirm = confirm_or_not
OptimizerStep.norm = norm_on_device
OptimizerStep.measure = lambda update, gradients: None  # a device would queue it; the host would wait for it here
if "ALONE" not in os.environ:
    ordered_transport.use()
session = scripted.begin("mlp, momentum")
for batch in session.batches(steps={STEPS}):
    if batch.step == step and session.rank == 1 and session._context.world.generation == 0:
        ordered_transport.stall(after=works)
    report = session.step(batch)
    finite = all(one.isfinite().all() for one in session._context.compute.model.parameters())
    print("finite", batch.step, finite, flush=True)
scripted.end(session)
"""


def test_no_update_before_all_say_that_they_have_their_means(run: Run, undisturbed: Any) -> None:
    environment = {"STALL": "3 2"}  # the step, and how many works rank 1 does in it
    ran = run(STALLED, "-n", 3, "--elastic", "1:3", deadline=60.0, **environment)
    check(ran, undisturbed(STALLED, **environment))
    assert not [text for text in ran.logs.values() if "False" in text], ran.report()
    wrong = run(STALLED, "-n", 3, "--elastic", "1:3", name="two", UNCONFIRMED="1", **environment)
    assert [text for text in wrong.logs.values() if "finite 3 False" in text], wrong.report()


# Rank 1 is lost while rank 0 audits: an abort leaves in what rank 0 has received whatever lies there.
LOST_IN_AN_AUDIT = f"""
import os
import signal
import scripted
from paceline.strategies.pipeline.audit import StageAudit
import ordered_transport

compute_again = StageAudit.compute_again

def compute_again_from_garbage(audit, outputs_of):
    world = session._context.world
    if session.position == 4 and world.generation == 0 and world.rank == 0 and world.size > 1:
        os.kill(world.coordinator._members[1].pid, signal.SIGKILL)
        scripted.wait_until(lambda: world.alarmed, "the loss")
        for gradient in audit.output_gradients:
            gradient.fill_(7.0)
        print("garbage", flush=True)
    compute_again(audit, outputs_of)

StageAudit.compute_again = compute_again_from_garbage
if "ALONE" not in os.environ:
    ordered_transport.use()
session = scripted.begin("mlp, momentum", strategy="pipeline")
for batch in session.batches(steps={STEPS}):
    scripted.say(session, session.step(batch))
scripted.end(session)
"""


def test_an_audit_blames_no_model_for_what_a_lost_worker_has_left(run: Run, undisturbed: Any) -> None:
    saving = "--set", "checkpoint.every=2", "--set", "checkpoint.background=false"  # rank 1 has a stage alone
    ran = run(LOST_IN_AN_AUDIT, "-n", 2, "--elastic", "1:2", *saving, deadline=60.0)
    assert ran.code == 0 and "garbage" in ran.logs["rank-0"], ran.report()
    assert {one["fingerprint"] for one in ran.printed()} == {undisturbed(LOST_IN_AN_AUDIT)["fingerprint"]}
