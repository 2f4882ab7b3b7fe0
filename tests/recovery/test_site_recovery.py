"""The loss of a worker with sites: the round is made without them, and they come back with the next worker."""

from __future__ import annotations

import json
from typing import Any

import pytest
from launching import Run

from paceline.testing import faults

SCRIPT = """
import json, os
from functools import partial
import paceline, scripted, torch
from paceline.data import Located
from subjects import mlp

sizes = dict(a=40, b=7, c=90, d=12, e=64, f=21)
held = json.loads(os.environ.get("HELD", "{}")).get(os.environ["RANK"], "abcdef")
rows = {
    name: [(row, int(row[:4].argmax())) for row in torch.randn(size, 12, generator=torch.Generator().manual_seed(size))]
    for name, size in sizes.items() if name in held
}
torch.manual_seed(0)
session = paceline.start(
    model=mlp(), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), loss=torch.nn.functional.cross_entropy,
    data=Located(rows), batch=32, exact=True, timeout_seconds=30, strategy="diloco",
    local={"every": 4, "sites": True, "masked": "MASKED" in os.environ}, checkpoint={"every": 8, "background": False},
)
for batch in session.batches(steps=int(os.environ.get("STEPS", 16))):
    scripted.say(session, session.step(batch))
    if batch.step == 7:  # in a round no worker waits for others, so before they may not know of a loss
        scripted.refill(session, 3)
scripted.end(session)
"""


@pytest.mark.slow
@pytest.mark.parametrize("masked", [{}, {"MASKED": "1"}], ids=["", "masked"])
def test_sites_are_missed_and_come_back(run: Run, masked: dict[str, str]) -> None:
    """The round of step 5 is made again without the sites of rank 2, and the worker in its place has them again."""
    if masked:
        pytest.importorskip("cryptography")
    held = json.dumps({"0": "abc", "1": "d", "2": "ef", "3": "ef"})
    ran = run(SCRIPT, "-n", 3, "--elastic", "2:3", faults=faults.kill(rank=2, step=5), HELD=held, **masked)
    assert ran.code == 0 and len(ran.launcher("lost")) == 1, ran.report()
    assert len({one["fingerprint"] for one in ran.printed()}) == 1, ran.report()
    made = {event["step"]: "".join(event["counts"]) for event in ran.events() if event["event"] == "outer-step"}
    assert {step: made[step] for step in (3, 7, 15)} == {3: "012345", 7: "0123", 15: "012345"}, ran.report()


@pytest.mark.slow
def test_a_masked_sum_is_made_once(run: Run) -> None:
    """Masks were removed before the loss: a sum without the sites of rank 2 would show what they had sent."""
    pytest.importorskip("cryptography")
    held = json.dumps({"0": "abc", "1": "d", "2": "ef", "3": "ef"})
    lost = faults.kill(rank=2, step=7, point="keeping replicas")
    ran = run(SCRIPT, "-n", 3, "--elastic", "2:3", faults=lost, HELD=held, MASKED="1", ALONE="1")
    assert ran.code == 0, ran.report()
    assert len({one["fingerprint"] for one in ran.printed()}) == 1, ran.report()
    events = [event for event in ran.events() if event["event"] == "outer-step" and event["rank"] == 0]
    made = [(event["step"], "".join(event["counts"])) for event in events]
    assert made[:3] == [(3, "012345"), (7, "012345"), (7, "")], made
    assert [step for step, sites in made[3:] if sites] == [11, 15], made


@pytest.mark.slow
def test_a_run_resumes_on_other_workers_with_the_sites(run: Run, undisturbed: Any) -> None:
    """It has the bits of one process."""
    alone = undisturbed(SCRIPT)
    first = run(SCRIPT, "-n", 3, HELD=json.dumps({"0": "abc", "1": "d", "2": "ef"}), STEPS="8", ALONE="1")
    assert first.code == 0, first.report()
    resumed = run(SCRIPT, "-n", 2, "--resume", "auto", HELD=json.dumps({"0": "fab", "1": "dce"}), ALONE="1", name="one")
    assert resumed.code == 0, resumed.report()
    ended = [one["fingerprint"] for one in resumed.printed() if one["position"] == 16]
    assert ended == [alone["fingerprint"]] * 2, resumed.report()
