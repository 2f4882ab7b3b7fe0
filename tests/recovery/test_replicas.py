"""Workers that are lost or leave while replicas train on their own: the bits of one process, and no replica is lost."""

import json
from typing import Any

import pytest
from launching import Run

from paceline.testing import faults

SCRIPT = """
import os, signal, time
import scripted
from subjects import images

session = scripted.begin(microbatches=12)
for batch in session.batches(steps=10):
    report = session.step(batch)
    scripted.say(session, report)
    if "LEAVE" in os.environ and batch.step == 4:
        if session.workers == 4 and session.rank in (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)
        session.evaluate(images(70))
scripted.end(session)
"""


def given(exact: bool = True, **local: float) -> dict[str, str]:
    return {"GIVEN": json.dumps({"strategy": "diloco", "exact": exact, "local": local})}


@pytest.mark.slow
@pytest.mark.parametrize(("after", "step"), [(0, 2), (2, 1)], ids=["an outer step", "synchronous steps"])
def test_a_worker_is_lost_while_replicas_are_kept(run: Run, after: int, step: int) -> None:
    """After synchronous steps there are no replicas yet, and the state to go back to is the model at rest."""
    environment = given(every=3, after=after)
    alone = run(SCRIPT, "-n", 1, name="alone", **environment)
    plan = faults.kill(rank=2, step=step, point="keeping replicas")
    ran = run(SCRIPT, "-n", 3, "--elastic", "1:3", faults=plan, **environment)
    assert ran.code == 0 and len(ran.launcher("lost")) == 1, ran.report()
    assert {one["fingerprint"] for one in ran.printed()} == {alone.printed()[0]["fingerprint"]}, ran.report()


@pytest.mark.slow
def test_neighbours_leave_together_between_two_outer_steps(run: Run) -> None:
    """Each has the copy of the other's replicas, which a worker that stays gets before they leave."""
    environment = given(every=3, replicas=4)
    alone = run(SCRIPT, "-n", 1, name="alone", LEAVE="1", **environment)
    ran = run(SCRIPT, "-n", 4, "--elastic", "1:4", LEAVE="1", **environment)
    assert ran.code == 0 and not ran.launcher("lost"), ran.report()
    told: list[dict[str, Any]] = ran.printed()
    assert {one["fingerprint"] for one in told} == {alone.printed()[0]["fingerprint"]}, ran.report()
    assert {event["step"] for event in ran.events() if event["event"] == "went back"} == {3}, ran.report()


@pytest.mark.slow
def test_workers_are_lost_before_within_and_after_a_flight(run: Run) -> None:
    """Fragments are sent after steps 2, 5, 8 and land two steps later; a period ends with the second one of them."""
    environment = given(every=6, fragments=2, delay=2, mixing=0.5)
    alone = run(SCRIPT, "-n", 1, name="alone", **environment)
    plan = faults.kill(rank=3, step=2, point="before forward") + faults.kill(rank=2, step=6, point="before forward")
    plan += faults.kill(rank=1, step=9, point="inside the collective")
    ran = run(SCRIPT, "-n", 4, "--elastic", "1:4", faults=plan, **environment)
    assert ran.code == 0 and len(ran.launcher("lost")) == 3, ran.report()
    assert {one["fingerprint"] for one in ran.printed()} == {alone.printed()[0]["fingerprint"]}, ran.report()
    assert {event["step"] for event in ran.events() if event["event"] == "went back"} == {2, 8}, ran.report()


@pytest.mark.slow
def test_the_parts_of_a_lost_worker_are_trained_in_the_same_period(run: Run) -> None:
    """Workers that claim parts go back to the last outer step, and claim all parts since then anew."""
    environment = given(every=3, uneven=True, exact=False)
    ran = run(SCRIPT, "-n", 3, "--elastic", "1:3", faults=faults.kill(rank=1, step=4), **environment)
    assert ran.code == 0 and len(ran.launcher("lost")) == 1, ran.report()
    counts = {event["step"]: event["counts"] for event in ran.events() if event["event"] == "outer-step"}
    assert {step: sum(samples.values()) for step, samples in counts.items()} == {2: 96, 5: 68, 8: 68}, ran.report()


STOPPED = """
import os, signal, subprocess
from pathlib import Path
import scripted
from subjects import tell

session = scripted.begin(microbatches=12)
late, again = Path(os.environ["PACELINE_RUN"]) / "late", "KILL" in os.environ
for batch in session.batches(steps=12):
    report = session.step(batch)
    scripted.say(session, report)
    if session.rank == 3 and batch.step == 3 and not late.exists():
        late.write_text(str(os.getpid()))
        if again:
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -KILL {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    if batch.step == 8 and not again:
        if session.rank == 0:
            os.kill(int(late.read_text()), signal.SIGCONT)
        session.save()
        tell(saved=session.fingerprint())
scripted.end(session, loss=report.loss)
"""


@pytest.mark.slow
def test_outer_steps_go_on_while_a_worker_is_stopped(run: Run) -> None:
    """It is stopped during two of them, what it has trained on counts in the last one, and is saved before."""
    environment = given(every=3, uneven=True, quorum=3, grace_seconds=0.5, exact=False)
    ran = run(STOPPED, "-n", 4, **environment)
    assert ran.code == 0, ran.report()
    counts = {event["step"]: event["counts"] for event in ran.events("rank-0") if event["event"] == "outer-step"}
    assert {step: sorted(replicas) for step, replicas in counts.items()} == {
        2: ["0", "1", "2", "3"],
        5: ["0", "1", "2"],
        8: ["0", "1", "2"],
        11: ["0", "1", "2", "3"],
    }, ran.report()
    assert len({one["fingerprint"] for one in ran.printed() if "fingerprint" in one}) == 1, ran.report()


@pytest.mark.slow
def test_a_late_worker_is_lost_while_the_others_wait_for_it(run: Run) -> None:
    """They go back to the last outer step of all, and take its replica over."""
    environment = given(every=3, uneven=True, quorum=3, grace_seconds=60, exact=False) | {"KILL": "1"}
    ran = run(STOPPED, "-n", 4, "--elastic", "1:4", **environment)
    assert ran.code == 0 and len(ran.launcher("lost")) == 1, ran.report()
    assert {event["step"] for event in ran.events() if event["event"] == "went back"} == {3}, ran.report()
    counts = {event["step"]: event["counts"] for event in ran.events("rank-0") if event["event"] == "outer-step"}
    assert all(sorted(replicas) == ["0", "1", "2", "3"] for replicas in counts.values()), ran.report()
