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


@pytest.mark.parametrize(
    "point", ["before forward", "inside the collective", "between reduction and update", "after update"]
)
def test_a_kill(run: Run, undisturbed: Any, point: Point) -> None:
    alone = undisturbed(SCRIPT)
    ran = run(SCRIPT, "-n", 3, "--elastic", "1:3", faults=faults.kill(rank=1, step=4, point=point))
    assert ran.code == 0, ran.report()
    assert len(ran.printed()) >= 2, ran.report()
    assert {one["fingerprint"] for one in ran.printed()} == {alone["fingerprint"]}, ran.report()
