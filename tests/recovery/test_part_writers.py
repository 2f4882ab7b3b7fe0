"""Workers that write parts of a checkpoint are lost: the checkpoint is whole, and no half one is left."""

from typing import Any

import pytest
from launching import Run
from test_recovery import ELASTIC, check

from paceline.checkpoint import load
from paceline.testing import faults

STEPS = 12
SMALL_PARTS = f"""
import scripted
from paceline.checkpoint import parts

parts.LEAST_BYTES = 1
session = scripted.begin(checkpoint={{"every": 4, "keep": 9}})
for batch in session.batches(steps={STEPS}):
    scripted.say(session, session.step(batch))
scripted.end(session)
"""


# The others are in the next step when rank 0 is lost: its save, of the step before, is begun again.
HELD = "import os\n" + SMALL_PARTS.replace(
    "    scripted.say",
    """    if batch.step == 8 and session.rank > 0 and "ALONE" not in os.environ:
        scripted.wait_until(lambda: scripted._recorded("lost"), "the loss")
    scripted.say""",
)


@pytest.mark.parametrize(("point", "victim"), [("writing a part", 1), ("inside a save", 0)])
def test_one_is_killed_while_it_saves(run: Run, undisturbed: Any, point: faults.Point, victim: int) -> None:
    ran = run(HELD if victim == 0 else SMALL_PARTS, *ELASTIC, faults=faults.kill(rank=victim, step=8, point=point))
    check(ran, undisturbed(SMALL_PARTS), 2)
    assert len(ran.launcher("lost")) == 1, ran.report()
    assert {8, STEPS} <= set(ran.saved()), ran.report()
    folder = ran.run / "checkpoints"
    for manifest in folder.glob("step-*/*/manifest.json"):
        content = load.read(manifest.parent, lambda *_: None)
        assert {one.name for one in manifest.parent.iterdir()} == {*content.manifest.files, "manifest.json"}
    assert not list(folder.glob(".partial-*")), ran.report()
