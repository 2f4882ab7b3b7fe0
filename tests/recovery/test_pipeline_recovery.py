"""Workers of a pipeline are lost: a stage that others hold as well goes on, another one comes from the checkpoint."""

from typing import Any

import pytest
from launching import Ran, Run

from paceline.testing import faults

STEPS = 10
SCRIPT = f"""
import scripted
from subjects import images, measure_alike

measure_alike()
session = scripted.begin(strategy="pipeline", microbatches=8)
values = []
for batch in session.batches(steps={STEPS}):
    scripted.say(session, session.step(batch))
    if batch.step in (2, 6):
        values.append(session.evaluate(images(70)).hex())
scripted.end(session, values=values)
"""
HYBRID = "-n", 4, "--elastic", "2:4", "--set", "pipeline.stages=2"
EVERY_3 = "--set", "checkpoint.every=3", "--set", "checkpoint.background=false"
SAVED = "-n", 3, "--elastic", "2:3", *EVERY_3


TWO_GO_ON = "import scripted\nscripted.hold_back(3, 'end')\n"


def check(ran: Ran, wanted: dict[str, Any], finishers: int) -> None:
    assert ran.code == 0, ran.report()
    ran.check_steps(STEPS)
    assert len(ran.printed()) >= finishers, ran.report()
    assert {one["fingerprint"] for one in ran.printed()} == {wanted["fingerprint"]}, ran.report()
    for one in ran.printed():  # a joiner has missed the first ones
        assert one["values"] == wanted["values"][len(wanted["values"]) - len(one["values"]) :], ran.report()


def went_back(ran: Ran) -> list[int]:
    return [one["step"] for one in ran.events() if one["event"] == "went back"]


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize(
    ("victim", "point"),
    [(3, "inside the collective"), (0, "between reduction and update"), (3, "between reduction and update")],
)
def test_a_worker_is_lost_while_gradients_come_together(run: Run, undisturbed: Any, victim: int, point: str) -> None:
    """Those that have their means by then must not update before all have."""
    ran = run(SCRIPT, *HYBRID, faults=faults.kill(rank=victim, step=5, point=point))
    check(ran, undisturbed(SCRIPT), 3)
    assert not went_back(ran), ran.report()


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_stage_that_nobody_else_holds_comes_from_the_checkpoint(run: Run, undisturbed: Any, victim: int) -> None:
    """The steps since then are taken again, by two workers with another cut."""
    ran = run(TWO_GO_ON + SCRIPT, *SAVED, faults=faults.kill(rank=victim, step=5))
    check(ran, undisturbed(SCRIPT), 2)
    assert went_back(ran) == [3, 3], ran.report()
    for step in (3, STEPS - 1):
        newest = [one for one in ran.events("rank-*") if one["event"] == "forward" and one["step"] == step][-1]
        assert newest["generation"] > 0


def test_a_step_that_the_script_left_out_is_not_taken_later(run: Run, undisturbed: Any) -> None:
    """After going back to step 3, in step 5."""
    script = SCRIPT.replace("    scripted.say", "    if batch.step == 4:\n        continue\n    scripted.say")
    ran = run(TWO_GO_ON + script, *SAVED, faults=faults.kill(rank=1, step=5))
    assert ran.code == 0 and went_back(ran) == [3, 3], ran.report()
    assert {one["fingerprint"] for one in ran.printed()} == {undisturbed(script)["fingerprint"]}, ran.report()


@pytest.mark.slow
def test_a_spare_takes_the_place_of_the_lost(run: Run, undisturbed: Any) -> None:
    ran = run(SCRIPT, *SAVED, "--standby", 1, faults=faults.kill(rank=2, step=4))
    check(ran, undisturbed(SCRIPT), 2)


@pytest.mark.slow
def test_stages_that_do_not_fit_the_workers_left_wait_for_a_replacement(run: Run, undisturbed: Any) -> None:
    """Three stages were asked for, so two workers cannot go on, though MIN is two."""
    script = "import scripted\nscripted.hold_back(3, 'short')\n" + SCRIPT
    ran = run(script, *SAVED, "--set", "pipeline.stages=3", faults=faults.kill(rank=1, step=5))
    check(ran, undisturbed(SCRIPT), 3)
    assert ran.memberships() == [[0, 1, 2], [0, 2, 3]] and went_back(ran) == [3, 3, 3], ran.report()
    (short,) = ran.launcher("short")
    assert short["text"] == "these settings are for 3 workers, and 2 are left; waiting for more"


@pytest.mark.slow
def test_fewer_microbatches_than_workers(run: Run, undisturbed: Any) -> None:
    """Three stages on three workers fit all the same."""
    two = SCRIPT.replace("microbatches=8", "microbatches=2")
    ran = run(two, *SAVED, "--set", "pipeline.stages=3", faults=faults.kill(rank=1, step=5))
    check(ran, undisturbed(two), 3)


def test_microbatches_that_do_not_fit_the_workers_are_refused_at_once(run: Run) -> None:
    two = "microbatches=2, exact=False, pipeline={'schedule': '2bw'}"
    ran = run(SCRIPT.replace("microbatches=8", two), "-n", 3)
    assert ran.code == 2, ran.report()
    assert "3 workers need at least as many microbatches from one update to the next, not 2" in ran.said


@pytest.mark.slow
def test_a_worker_is_lost_where_others_have_nothing_to_compute(run: Run, undisturbed: Any) -> None:
    one = SCRIPT.replace("microbatches=8", "microbatches=1")
    ran = run(one, *HYBRID, faults=faults.kill(rank=0, step=5))
    check(ran, undisturbed(one), 3)
    assert not went_back(ran), ran.report()


@pytest.mark.slow
def test_stages_that_do_not_fit_the_workers_left_end_the_run_when_nobody_comes(run: Run) -> None:
    script = SCRIPT.replace("    scripted.say", "    scripted.leave(session, batch, 1, 4)\n    scripted.say")
    ran = run(script, *SAVED, "--set", "pipeline.stages=3")
    assert ran.code == 75, ran.report()
    assert ran.saved()[-1] >= 4, ran.report()


AGAIN = SCRIPT.replace(
    "session =",
    """import paceline
try:
    scripted.begin(strategy="pipeline", microbatches=8, pipeline={"cut": ["none of this name"]})
except paceline.ConfigError:
    print("refused")
session =""",
)


@pytest.mark.slow
def test_another_start_after_one_that_was_refused(run: Run, undisturbed: Any) -> None:
    ran = run(AGAIN, "-n", 2)
    check(ran, undisturbed(SCRIPT), 2)
    assert all("refused" in text for text in ran.logs.values())


MODES = f"""
import scripted
from pipeline_cases import CUT
import paceline

given = CUT["skips"]()
session = paceline.start(**given, strategy="pipeline", timeout_seconds=30)
for batch in session.batches(steps={STEPS}):
    given["model"].train(batch.step < 6)
    scripted.say(session, session.step(batch))
scripted.end(session)
"""


@pytest.mark.slow
def test_a_joiner_of_a_model_in_another_mode(run: Run) -> None:
    """It comes from the start of the script, where the model still trains; the others have it in evaluation."""
    settings = "checkpoint.every=4", "checkpoint.background=false", "pipeline.cut=second,third"
    words = [word for setting in settings for word in ("--set", setting)]
    ran = run(MODES, "-n", 3, "--elastic", "2:3", *words, faults=faults.kill(rank=1, step=7))
    assert ran.code == 0, ran.report()
    assert ran.memberships() == [[0, 1, 2], [0, 2, 3]], ran.report()  # nobody has waited in vain
    assert went_back(ran) == [4, 4, 4], ran.report()
    assert len(ran.printed()) == 3 and len({one["fingerprint"] for one in ran.printed()}) == 1, ran.report()


STREAMED = "--set", "pipeline.schedule=pipedream", "--set", "exact=false"


@pytest.mark.slow(turns=6)
def test_a_worker_that_is_told_to_leave_a_pipeline_that_never_runs_empty_takes_no_stage_along(run: Run) -> None:
    """Without a checkpoint: the others have its stage before it goes."""
    script = SCRIPT.replace("    scripted.say", "    scripted.leave(session, batch, 1, 4)\n    scripted.say")
    script = script.replace(f"steps={STEPS}", "steps=25")  # PipeDream looks for that every 20 steps
    ran = run(script, "-n", 3, "--elastic", "2:3", *STREAMED)
    assert ran.code == 0, ran.report()
    assert ran.launcher("lost") == [] and not went_back(ran)
    assert ran.memberships() == [[0, 1, 2], [0, 2]]
    assert len(ran.printed()) == 2


def test_a_launcher_that_is_told_to_end_saves_the_whole(run: Run, undisturbed: Any) -> None:
    script = SCRIPT.replace("    scripted.say", "    scripted.end_launcher(session, batch, 4)\n    scripted.say")
    ran = run(script, "-n", 2)
    assert ran.code == 75, ran.report()
    assert 5 <= ran.saved()[-1] < STEPS
    again = run(SCRIPT, "-n", 3, "--resume", "auto", faults=None)
    assert again.code == 0, again.report()
    assert {one["fingerprint"] for one in again.printed()} == {undisturbed(SCRIPT)["fingerprint"]}


@pytest.mark.slow
def test_what_is_saved_at_the_end_is_whole_or_not_at_all(run: Run) -> None:
    """A part of the model would be taken for the whole when the run is resumed."""
    ran = run(SCRIPT, "-n", 2, *EVERY_3, faults=faults.kill(rank=1, step=5))
    assert ran.code == 5, ran.report()
    assert ran.saved() == [3], ran.report()


@pytest.mark.slow
def test_another_loss_while_the_others_agree(run: Run, undisturbed: Any) -> None:
    """The second one holds the same stage as the first: its stage is gone, and there is a checkpoint of it."""
    both = faults.kill(rank=3, step=5) + faults.kill(rank=2, step=5, point="during recovery")
    ran = run(SCRIPT, *HYBRID, *EVERY_3, faults=both)
    check(ran, undisturbed(SCRIPT), 2)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [HYBRID, SAVED], ids=["replicas", "checkpoint"])
def test_a_pipeline_that_never_runs_empty_goes_on(run: Run, layout: tuple[Any, ...]) -> None:
    """Not to the same bits; but to one state on all workers, and every step is there."""
    script = SCRIPT.replace("microbatches=8", "microbatches=8, exact=False")
    schedule = "--set", "pipeline.schedule=pipedream", "--set", "pipeline.update_every=4"
    ran = run(script, *layout, *schedule, faults=faults.kill(rank=1, step=5))
    assert ran.code == 0, ran.report()
    assert len({one["fingerprint"] for one in ran.printed()}) == 1, ran.report()
    assert len(ran.printed()) >= 2
    assert bool(went_back(ran)) == (layout is SAVED)


@pytest.mark.slow
def test_without_a_checkpoint_the_loss_is_said(run: Run) -> None:
    ran = run(SCRIPT, "-n", 2, "--elastic", "1:2", faults=faults.kill(rank=1, step=5))
    assert ran.code != 0
    assert "held by lost workers only, and there is no checkpoint to go back to" in ran.report()
