"""Workers are lost while microbatches move between them; the bits stay those of an undisturbed run."""

from typing import Any

import pytest
from launching import Run
from test_recovery import OVER_THE_NETWORK

from paceline.testing import faults

SCRIPT = """
import time
import scripted
from subjects import CASES

given = CASES["batch norm, dropout, short batch"]()
loss = given["loss"]

def forward(model, microbatch):
    if session.workers > 1:
        time.sleep(0.02 if session.rank == 1 else 0.002)
    features, target = microbatch
    return loss(model(features), target)

session = scripted.begin(loss=None, forward=forward, strategy="stealing", microbatches=16)
for batch in session.batches(steps=10):
    scripted.say(session, session.step(batch))
scripted.end(session)
"""


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize(("victim", "path"), [(0, OVER_THE_NETWORK), (1, ""), (2, OVER_THE_NETWORK)])
def test_a_worker_is_lost_while_it_holds_a_lease(run: Run, undisturbed: Any, victim: int, path: str) -> None:
    """The step is repeated: what it held is free again. Over the network rank 0 counts who owns which microbatch."""
    ran = run(path + SCRIPT, "-n", 3, "--elastic", "1:3", faults=faults.kill(rank=victim, step=5))
    assert ran.code == 0, ran.report()
    ran.check_steps(10)
    assert {one["fingerprint"] for one in ran.printed()} == {undisturbed(SCRIPT)["fingerprint"]}, ran.report()
    assert [one for one in ran.events() if one["event"] == "steal"], ran.report()


@pytest.mark.slow
def test_a_spare_takes_the_place_of_the_lost(run: Run, undisturbed: Any) -> None:
    ran = run(SCRIPT, "-n", 2, "--elastic", "2:3", "--standby", 1, faults=faults.kill(rank=1, step=4))
    assert ran.code == 0, ran.report()
    assert {one["fingerprint"] for one in ran.printed()} == {undisturbed(SCRIPT)["fingerprint"]}, ran.report()
