"""A worker is lost where a wait neither blocks nor raises, as on NCCL: nobody updates from what has not come."""

from typing import Any

import pytest
from launching import Run

from paceline.testing import faults
from paceline.testing.faults import Point

STEPS = 8
SCRIPT = f"""
import os
import scripted
from paceline.testing import ordered_transport

if "ALONE" not in os.environ:
    ordered_transport.use()
session = scripted.begin()
for batch in session.batches(steps={STEPS}):
    scripted.say(session, session.step(batch))
scripted.end(session)
"""

# nothing comes from the others between the means of the gradients and the update
NO_BUFFERS = SCRIPT.replace("scripted.begin()", 'scripted.begin("mlp, momentum")')


@pytest.mark.parametrize("script", [SCRIPT, NO_BUFFERS], ids=["buffers", "no buffers"])
@pytest.mark.parametrize(
    "point", ["before forward", "inside the collective", "between reduction and update", "after update"]
)
def test_a_kill(run: Run, undisturbed: Any, point: Point, script: str) -> None:
    alone = undisturbed(script)
    ran = run(script, "-n", 3, "--elastic", "1:3", faults=faults.kill(rank=1, step=4, point=point))
    assert ran.code == 0, ran.report()
    assert len(ran.printed()) >= 2, ran.report()
    assert {one["fingerprint"] for one in ran.printed()} == {alone["fingerprint"]}, ran.report()
