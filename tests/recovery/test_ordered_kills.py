"""Workers are lost at every fault point, one after the other in one run, on a transport that breaks as NCCL does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import Run

from paceline.testing import faults
from paceline.testing.faults import POINTS, Plan, Point

STEPS = 30
SCRIPT = f"""
import os
import scripted
from subjects import images
from paceline.checkpoint import parts
import ordered_transport

parts.LEAST_BYTES = 1
if "ALONE" not in os.environ:
    ordered_transport.use()
session = scripted.begin(microbatches=8)
values = []
for batch in session.batches(steps={STEPS}):
    scripted.refill(session, int(os.environ["WORKERS"]))
    report = session.step(batch)
    scripted.say(session, report)
    if batch.step == 17:
        values.append(session.evaluate(images(70)).hex())
scripted.end(session, values=values, loss=report.loss)
"""
SAVING = "--set", "checkpoint.every=2", "--set", "checkpoint.background=false"

KILLS: list[tuple[int, int, Point]] = [
    (1, 3, "before forward"),
    (0, 5, "in the loader"),
    (2, 7, "inside the collective"),
    (1, 10, "writing a part"),
    (2, 12, "between reduction and update"),
    (1, 15, "after update"),
    (0, 18, "in evaluate"),
    (0, 20, "inside a save"),
    (2, 23, "before forward"),
    (1, 23, "during recovery"),
    (2, 27, "before forward"),
    (0, 27, "sending the state"),
]
"""Rank, step, and point; three steps after each all places are filled again at the latest.

If no save is due between two steps, no worker is still in the one before when another has begun the next.
"""


def pipeline(schedule: str, workers: int) -> dict[str, Any]:
    """Of two workers, or of two times two that hold the same."""
    stages = 4 if schedule in ("interleaved", "zb-v") else 2
    return {
        "strategy": "pipeline",
        "pipeline": {"schedule": schedule, "stages": stages} if workers > 2 else {"schedule": schedule},
    }


TREE = {"reduction": "tree"}
STREAMED = {"exact": False}
ALONG: list[Any] = [
    pytest.param(3, TREE, id="tree"),
    pytest.param(3, {"exact": "fixed-point"}, id="fixed point"),
    pytest.param(3, {"strategy": "stealing"}, id="stealing"),
    pytest.param(3, {"strategy": "diloco", "local": {"every": 2}}, id="diloco"),
    *(
        pytest.param(workers, pipeline(schedule, workers), id=f"{schedule} on {workers}")
        for schedule in ("layerwise", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
        for workers in (2, 4)
    ),
]
"""With the bits of one process."""
ALIKE: list[Any] = [
    pytest.param(3, {"reduction": "collective"}, id="collective"),
    pytest.param(3, TREE, id="running sums"),
    pytest.param(3, {"strategy": "backup"}, id="backup workers"),
    *(
        pytest.param(workers, pipeline(schedule, workers), id=f"{schedule} on {workers}")
        for schedule in ("pipedream", "2bw")
        for workers in (2, 4)
    ),
]
"""Whose bits depend on the workers."""


def kills(workers: int, given: dict[str, Any]) -> Plan:
    """Those at points that a strategy reaches."""
    never: set[Point] = {"writing a part"} if given.get("strategy") in ("diloco", "pipeline") else set()
    if given.get("strategy") == "pipeline" and workers < 4:  # each tensor is on one worker
        never.add("inside the collective")
    chosen = [kill for kill in KILLS if kill[-1] not in never]
    if given.get("strategy") == "diloco":  # the batch of step 15 is short, and has microbatches for rank 0 only
        chosen = [(0 if kill[1] == 15 else kill[0], *kill[1:]) for kill in chosen]
    return sum((faults.kill(rank=rank % workers, step=step, point=point) for rank, step, point in chosen), Plan())


def attack(run: Run, workers: int, given: dict[str, Any], directory: Path, may_miss: int = 0) -> list[dict[str, Any]]:
    """What the workers say at the end that came to it; what was ordered has happened, but for so many kills."""
    ordered = kills(workers, given)
    environment = {"GIVEN": json.dumps(given), "WORKERS": str(workers)}
    ran = run(SCRIPT, "-n", workers, "--elastic", f"1:{workers}", *SAVING, faults=ordered, **environment)
    assert ran.code == 0, ran.report()
    happened = faults.happened(directory / "marks")
    missed = [fault for index, fault in enumerate(ordered.faults) if index not in happened]
    assert len(missed) <= may_miss, f"{missed}\n{ran.report()}"
    told = ran.printed()
    assert told and len({one["fingerprint"] for one in told}) == 1, ran.report()
    return told


def test_a_step_that_is_repeated_on_the_way_to_a_save_is_saved_once(run: Run, tmp_path: Path) -> None:
    """Rank 0 is to save after step 3, and waits for rank 1; then both repeat it, from the checkpoint before."""
    environment = {"GIVEN": json.dumps({"exact": False} | pipeline("2bw", 2)), "WORKERS": "2"}
    lost = faults.kill(rank=1, step=3)
    script = SCRIPT.replace(f"steps={STEPS}", "steps=8")
    ran = run(script, "-n", 2, "--elastic", "1:2", *SAVING, faults=lost, **environment)
    assert ran.code == 0, ran.report()
    saved = [(one["generation"], one["step"]) for one in ran.events() if one["event"] == "checkpoint"]
    assert len(saved) == len(set(saved)), saved


def test_the_kills_are_at_every_point() -> None:
    elsewhere = {"keeping replicas", "sending samples"}  # test_replicas, test_located_recovery
    assert {point for *_, point in KILLS} | elsewhere == set(POINTS)


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize(("workers", "given"), ALONG)
def test_the_bits_are_those_of_one_process(
    run: Run, undisturbed: Any, tmp_path: Path, workers: int, given: dict[str, Any]
) -> None:
    function = ("exact", "strategy", "local") if "local" in given else ("exact",)
    fixed = {key: value for key, value in given.items() if key in function}
    alone = undisturbed(SCRIPT, GIVEN=json.dumps(fixed), WORKERS="1")
    may_miss = 2 if given.get("strategy") == "stealing" else 0  # others may have taken all that a late one had
    for one in attack(run, workers, given, tmp_path, may_miss):
        assert one["fingerprint"] == alone["fingerprint"]
        assert one["values"] in (alone["values"], [])


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize(("workers", "given"), ALIKE)
def test_the_survivors_are_alike(run: Run, tmp_path: Path, workers: int, given: dict[str, Any]) -> None:
    may_miss = 0 if given.get("strategy") is None else 8  # they take joiners in between some steps only
    attack(run, workers, {"exact": False} | given, tmp_path, may_miss)
