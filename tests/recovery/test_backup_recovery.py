"""Workers are lost under backup workers and local SGD: no sample is lost, or only what the page says."""

import json
from collections import Counter
from typing import Any

import pytest
from launching import BATCH, LENGTH, Ran, Run

from paceline.data.order import Order
from paceline.observe import ledger
from paceline.testing import faults
from paceline.testing.faults import Point

ELASTIC = "-n", 3, "--elastic", "1:3"
PARTS = 8
ORDER = Order(LENGTH, BATCH, PARTS, seed=0)

SCRIPT = """
import json, os, time
import scripted
from subjects import CASES, images

given = CASES["batch norm, dropout, short batch"]()
loss, slow = given["loss"], json.loads(os.environ.get("SLOW", "[0, 0, 0]"))

def forward(model, microbatch):
    time.sleep(slow[session.rank] if session.workers > 1 else 0)
    features, target = microbatch
    return loss(model(features), target)

session = scripted.begin(loss=None, forward=forward, exact=False, **json.loads(os.environ["SETTINGS"]))
for batch in session.batches(steps=12):
    scripted.say(session, session.step(batch))
    if session.position % 5 == 0:
        session.evaluate(images(70))
scripted.end(session)
"""


def check_together(ran: Ran, finishers: int) -> None:
    """All that came to the end hold the same model, at the last step."""
    assert ran.code == 0, ran.report()
    told = ran.printed()
    assert len(told) >= finishers and told == [told[0]] * len(told), ran.report()
    assert told[0]["position"] == 12
    assert ledger.check(ledger.read(ran.run / "events"), 12, ORDER.samples_of) == [], ran.report()


def sets_of(ran: Ran) -> dict[int, list[list[Any]]]:
    """What each step used, by the last workers that did it; those of a generation agree on it."""
    newest: dict[int, tuple[int, list[list[Any]]]] = {}
    for event in ran.events():
        if event["event"] != "backup":
            continue
        step, generation = event["step"], event["generation"]
        known = newest.get(step)
        assert known is None or known[0] != generation or known[1] == event["used"], ran.report()
        if known is None or known[0] <= generation:
            newest[step] = generation, event["used"]
    return {step: used for step, (_, used) in sorted(newest.items())}


def check_epochs(ran: Ran) -> None:
    sets = sets_of(ran)
    assert list(sets) == list(range(12))
    for first in range(0, 12, ORDER.steps_per_epoch):
        members = [one for step in range(first, first + 4) for _, group in sets[step] for one in group]
        samples = [sample for step, number in members for sample in ORDER.microbatches_of(step)[number]]
        assert Counter(samples) == Counter(range(LENGTH)), ran.report()


BACKUP = json.dumps({"strategy": "backup", "microbatches": PARTS})
AT: dict[Point, int] = {
    "before forward": 6,
    "inside the collective": 5,
    "between reduction and update": 6,
    "after update": 6,
    "in evaluate": 5,
}


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("point", AT)
def test_no_sample_is_lost_with_a_worker(run: Run, point: Point, victim: int) -> None:
    """Worker 1 is slow, so in each step something is owed to the epoch."""
    plan = faults.kill(rank=victim, step=AT[point], point=point)
    ran = run(SCRIPT, *ELASTIC, faults=plan, SETTINGS=BACKUP, SLOW="[0.002, 0.02, 0.002]")
    check_together(ran, 2)
    ran.check_steps(12)
    check_epochs(ran)
    assert len(ran.launcher("lost")) == 1
    assert any(event["dropped"] for event in ran.events() if event["event"] == "backup"), ran.report()


def test_the_last_worker_uses_what_was_too_late(run: Run) -> None:
    plan = faults.kill(rank=0, step=5) + faults.kill(rank=2, step=6)
    ran = run(SCRIPT, *ELASTIC, faults=plan, SETTINGS=BACKUP, SLOW="[0.002, 0.02, 0.002]")
    check_together(ran, 1)
    check_epochs(ran)


NETWORK = """
import paceline.comm.shm.arena, paceline.training.recovery.formation
paceline.training.recovery.formation.can_share = lambda: False
"""


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize("victim", [0, 2])
def test_over_the_network(run: Run, victim: int) -> None:
    """Worker 0 holds the store in which they agree."""
    plan = faults.kill(rank=victim, step=6, point="inside the collective")
    ran = run(NETWORK + SCRIPT, *ELASTIC, faults=plan, SETTINGS=BACKUP, SLOW="[0.002, 0.02, 0.002]")
    check_together(ran, 2)
    check_epochs(ran)


@pytest.mark.slow
def test_fewer_workers_than_backup_workers_asked_for(run: Run) -> None:
    settings = json.dumps({"strategy": "backup", "microbatches": PARTS, "backup": {"workers": 2}})
    ran = run(SCRIPT, *ELASTIC, faults=faults.kill(rank=1, step=5), SETTINGS=settings)
    check_together(ran, 2)
    check_epochs(ran)
    used = sets_of(ran)
    assert {len(used[step]) for step in (0, 1, 2, 8, 9, 10)} == {1}


TWO_GO_ON = "import scripted\nscripted.hold_back(3, 'end')\n"
LOCAL = json.dumps({"strategy": "local-sgd", "local": {"every": 2}})


@pytest.mark.sampled(1, turns=6)
@pytest.mark.crossed
@pytest.mark.parametrize("path", ["memory", "network"])
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("step", [5, 8])
def test_the_others_go_back_to_the_last_outer_step(run: Run, step: int, victim: int, path: str) -> None:
    """A worker is lost between two outer steps, or just before one."""
    point: Point = "after update" if step == 8 else "before forward"
    script = TWO_GO_ON + (SCRIPT if path == "memory" else NETWORK + SCRIPT)
    ran = run(script, *ELASTIC, faults=faults.kill(rank=victim, step=step, point=point), SETTINGS=LOCAL)
    check_together(ran, 2)
    assert len(ran.launcher("lost")) == 1
    outer = {event["step"] for event in ran.events() if event["event"] == "outer-step"}
    assert outer == {1, 3, 5, 7, 9, 11}, ran.report()
    assert {event["step"] for event in ran.events() if event["event"] == "went back"} == {step // 2 * 2}, ran.report()


@pytest.mark.slow
def test_a_spare_takes_the_place_of_the_lost(run: Run) -> None:
    for settings in (BACKUP, LOCAL):
        ran = run(
            SCRIPT,
            *("-n", 2, "--elastic", "2:3", "--standby", 1),
            faults=faults.kill(rank=1, step=4),
            name=f"standby-{settings == LOCAL}",
            SETTINGS=settings,
            SLOW="[0.01, 0.01, 0.01]",
        )
        check_together(ran, 2)
