"""Whether modules are in training or evaluation mode: the same on all workers, and a part of the state."""

from typing import Any

import pytest
from launching import Run
from test_recovery import ELASTIC, STEPS, check

from paceline.testing import faults

ONCE = f"""
import scripted
from subjects import CASES

given = CASES["batch norm, dropout, short batch"]()
session = scripted.begin(model=given["model"], checkpoint={{"every": 6, "background": False}})
for batch in session.batches(steps={STEPS}):
    if batch.step == 3:
        given["model"].eval()
    if batch.step == 8:
        scripted.await_joiner(session)
    scripted.say(session, session.step(batch))
scripted.end(session)
"""


@pytest.mark.slow
def test_a_joiner_has_the_modes_of_the_others(run: Run, undisturbed: Any) -> None:
    """What changed them was before its time."""
    ran = run(ONCE, *ELASTIC, faults=faults.kill(rank=1, step=5))
    check(ran, undisturbed(ONCE), 3)


@pytest.mark.slow
def test_a_resumed_run_has_the_modes_of_the_checkpoint(run: Run, undisturbed: Any) -> None:
    ended = run(ONCE, "-n", 2, faults=faults.kill(rank=1, step=7), ALONE="1")
    assert ended.code != 0 and ended.saved(), ended.report()
    again = run(ONCE, "-n", 3, "--resume", "auto", faults=None, ALONE="1")
    assert again.code == 0, again.report()
    assert {one["fingerprint"] for one in again.printed()} == {undisturbed(ONCE)["fingerprint"]}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("what", "named"), [("model", "The model"), ("model[1]", "The module '1'")], ids=["the model", "a module"]
)
@pytest.mark.promise("docs/train.md", "A worker in another mode is named.")
@pytest.mark.parametrize("step", [0, 4])
def test_one_worker_in_another_mode(run: Run, what: str, named: str, step: int) -> None:
    script = ONCE.replace("    if batch.step == 3:", f"    if (session.rank, batch.step) == (1, {step}):")
    script = script.replace('given["model"].eval()', f"{what}.eval()").replace(
        "session =", 'model = given["model"]\nsession ='
    )
    ran = run(script, "-n", 2, ALONE="1")
    assert ran.code != 0
    assert f"{named} is in evaluation mode on rank 1, and not on rank 0." in ran.said, ran.report()


@pytest.mark.slow
def test_a_model_in_evaluation_mode_is_noted(run: Run) -> None:
    script = ONCE.replace("session =", 'given["model"].eval()\nsession =')
    ran = run(script, "-n", 1, ALONE="1")
    assert ran.code == 0
    assert "the model is in evaluation mode" in ran.said, ran.report()
