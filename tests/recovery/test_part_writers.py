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


@pytest.mark.parametrize("point", ["writing a part", "inside a save"])
def test_one_is_killed_while_it_saves(run: Run, undisturbed: Any, point: faults.Point) -> None:
    victim = 1 if point == "writing a part" else 0
    ran = run(SMALL_PARTS, *ELASTIC, faults=faults.kill(rank=victim, step=8, point=point))
    check(ran, undisturbed(SMALL_PARTS), 2)
    assert len(ran.launcher("lost")) == 1, ran.report()
    assert STEPS in ran.saved(), ran.report()
    folder = ran.run / "checkpoints"
    for manifest in folder.glob("step-*/*/manifest.json"):
        content = load.read(manifest.parent, lambda *_: None)
        assert {one.name for one in manifest.parent.iterdir()} == {*content.manifest.files, "manifest.json"}
    assert not list(folder.glob(".partial-*")), ran.report()
