"""A worker is lost while the back end adds up gradients: the others go on, alike, to the loss of one process."""

import json
from typing import Any

import pytest
from launching import Run

from paceline.testing import faults
from paceline.testing.faults import Point

SCRIPT = """
import scripted

session = scripted.begin("batch norm, dropout, short batch", exact=False, **GIVEN)
for batch in session.batches(steps=12):
    report = session.step(batch)
    scripted.say(session, report)
scripted.end(session, loss=report.loss)
"""


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize(
    ("victim", "point"), [(0, "before forward"), (2, "inside the collective"), (0, "between reduction and update")]
)
def test_a_kill(run: Run, undisturbed: Any, victim: int, point: Point) -> None:
    alone = undisturbed(SCRIPT.replace("GIVEN", "{}"))
    script = SCRIPT.replace("GIVEN", "{'reduction': 'collective'}")
    ran = run(script, "-n", 3, "--elastic", "1:3", faults=faults.kill(rank=victim, step=6, point=point))
    assert ran.code == 0, ran.report()
    ran.check_steps(12)
    told = ran.printed()
    assert len(told) >= 2, ran.report()
    assert len({json.dumps(one, sort_keys=True) for one in told}) == 1, ran.report()
    assert told[0]["loss"] == pytest.approx(alone["loss"], rel=1e-4)
