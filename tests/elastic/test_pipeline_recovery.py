"""Workers of a pipeline are lost: a stage that others hold as well goes on, another one comes from the checkpoint."""

from typing import Any

import pytest
from launchers import Ran, Run

from paceline.testing import faults

STEPS = 10
SCRIPT = f"""
import crew
from subjects import images

session = crew.begin(strategy="pipeline", microbatches=8)
values = []
for batch in session.batches(steps={STEPS}):
    crew.say(session, session.step(batch))
    if batch.step in (2, 6):
        values.append(session.evaluate(images(70)).hex())
crew.end(session, values=values)
"""
HYBRID = "-n", 4, "--elastic", "2:4", "--set", "pipeline.stages=2"
SAVED = "-n", 3, "--elastic", "2:3", "--set", "checkpoint.every=3", "--set", "checkpoint.background=false"


def check(ran: Ran, wanted: dict[str, Any], finishers: int) -> None:
    assert ran.code == 0, ran.story()
    ran.check_steps(STEPS)
    assert len(ran.told()) >= finishers, ran.story()
    assert {one["fingerprint"] for one in ran.told()} == {wanted["fingerprint"]}, ran.story()
    for one in ran.told():  # a joiner has missed the first ones
        assert one["values"] == wanted["values"][len(wanted["values"]) - len(one["values"]) :], ran.story()


def went_back(ran: Ran) -> list[int]:
    return [one["step"] for one in ran.events() if one["event"] == "went back"]


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_a_stage_that_two_workers_hold_survives_in_place(run: Run, undisturbed: Any, victim: int) -> None:
    ran = run(SCRIPT, *HYBRID, faults=faults.kill(rank=victim, step=5))
    check(ran, undisturbed(SCRIPT), 3)
    assert not went_back(ran), ran.story()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_stage_that_nobody_else_holds_comes_from_the_checkpoint(run: Run, undisturbed: Any, victim: int) -> None:
    """The steps since then are taken again, by two workers with another cut."""
    ran = run(SCRIPT, *SAVED, faults=faults.kill(rank=victim, step=5))
    check(ran, undisturbed(SCRIPT), 2)
    assert went_back(ran) == [3, 3], ran.story()


def test_a_worker_that_hangs_is_dropped(run: Run, undisturbed: Any) -> None:
    stop = faults.stop(rank=1, step=5)
    ran = run(SCRIPT, *HYBRID, "--grace", 1, "--set", "hang_seconds=1", faults=stop)
    check(ran, undisturbed(SCRIPT), 3)
    assert [one["rank_lost"] for one in ran.launcher("lost")] == [1]


def test_a_spare_takes_the_place_of_the_lost(run: Run, undisturbed: Any) -> None:
    ran = run(SCRIPT, *SAVED, "--standby", 1, faults=faults.kill(rank=2, step=4))
    check(ran, undisturbed(SCRIPT), 2)


@pytest.mark.parametrize("layout", [HYBRID, SAVED], ids=["replicas", "checkpoint"])
def test_a_pipeline_that_never_runs_empty_goes_on(run: Run, layout: tuple[Any, ...]) -> None:
    """Not to the same bits; but to one state on all workers, and every step is there."""
    script = SCRIPT.replace("microbatches=8", "microbatches=8, exact=False")
    schedule = "--set", "pipeline.schedule=pipedream", "--set", "pipeline.update_every=4"
    ran = run(script, *layout, *schedule, faults=faults.kill(rank=1, step=5))
    assert ran.code == 0, ran.story()
    assert len({one["fingerprint"] for one in ran.told()}) == 1, ran.story()
    assert len(ran.told()) >= 2
    assert bool(went_back(ran)) == (layout is SAVED)


def test_without_a_checkpoint_the_loss_is_said(run: Run) -> None:
    ran = run(SCRIPT, "-n", 2, "--elastic", "1:2", faults=faults.kill(rank=1, step=5))
    assert ran.code != 0
    assert "held by lost workers only, and there is no checkpoint to go back to" in ran.story()
