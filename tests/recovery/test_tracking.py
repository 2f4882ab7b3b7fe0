"""One tracked run: through the loss of rank 0, twice, and a resume, each value is recorded once."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from launching import Ran, Run
from test_recovery import ELASTIC

from paceline.testing import faults

STEPS = 14
SCRIPT = f"""
import sys
import torch
import scripted

session = scripted.begin(checkpoint={{"every": 4, "background": False}}, trackers="csv,tensorboard")
for batch in session.batches(steps={STEPS}):
    report = session.step(batch)
    scripted.say(session, report)
    session.log({{"twice": 2 * report.loss}})
    if batch.last:
        session.log({{"picture": torch.full((1, 2, 2), batch.epoch / 4), "said": f"epoch {{batch.epoch}}"}})
    if batch.step == int(sys.argv[1]):
        raise SystemExit("stopped by the script")
scripted.end(session)
"""


def rows(folder: Path) -> dict[tuple[str, int], list[str]]:
    """What the file has for each name and step."""
    found: dict[tuple[str, int], list[str]] = {}
    with (folder / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            found.setdefault((row["name"], int(row["step"])), []).append(row["value"])
    return found


def folder_of(ran: Ran) -> Path:
    (folder,) = (path for path in (ran.run / "trackers").iterdir() if path.is_dir())
    return folder


def numbers(folder: Path) -> dict[str, dict[int, list[float]]]:
    """What TensorBoard reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0, "images": 0}).Reload()
    found: dict[str, dict[int, list[float]]] = {}
    for name in read.Tags()["scalars"]:
        for one in read.Scalars(name):
            found.setdefault(name, {}).setdefault(one.step, []).append(one.value)
    found["pictures"] = {one.step: [float(one.width)] for one in read.Images("picture")}
    return found


@pytest.mark.slow
def test_one_run_after_two_losses_and_a_resume(run: Run) -> None:
    lost = faults.kill(rank=0, step=2) + faults.kill(rank=0, step=5)
    before = run(SCRIPT, *ELASTIC, "--set", "exact=true", arguments=[10], faults=lost)
    assert before.code != 0
    assert len(before.memberships()) >= 3, before.report()
    after = run(SCRIPT, "-n", 2, "--set", "exact=true", "--resume", "auto", arguments=[-1], ALONE="1")
    assert after.code == 0, after.report()
    whole = run(SCRIPT, "-n", 1, "--set", "exact=true", arguments=[-1], name="whole", ALONE="1")
    assert whole.code == 0, whole.report()

    folder, wanted = folder_of(after), rows(folder_of(whole))
    found = rows(folder)
    assert found.keys() == wanted.keys()
    assert {key for key, values in found.items() if len(values) != 1} == set()
    exact = [key for key in wanted if key[0] in ("loss", "learning_rate", "gradient_norm", "twice")]
    assert len(exact) == 4 * STEPS
    assert {key: found[key] for key in exact} == {key: wanted[key] for key in exact}

    shown = numbers(folder)
    for name in ("loss", "twice"):
        assert shown[name].keys() == set(range(STEPS))
        for step, values in shown[name].items():
            assert values == [float(f"{float(found[name, step][0]):.9g}")] or len(values) == 1
    assert shown["pictures"].keys() == {step for name, step in wanted if name == "picture"}

    about = json.loads((folder / "run.json").read_text())
    assert about["settings"]["exact"] is True and about["sources"]["exact"] == "command line"
    assert about["environment"]["torch"] and about["environment"]["workers"] == 3
    logged = [one for one in after.events("rank-0") if one["event"] == "metrics" and one.get("images")]
    assert all(Path(one["images"]["picture"]).read_bytes().startswith(b"\x89PNG") for one in logged)
    assert all(Path(one["texts"]["said"]).read_text().startswith("epoch") for one in logged)


# rank 0 has its sums of step 6, and hears of a loss before its update; rank 1 does that update, and says so
BEHIND = f"""
import os
from pathlib import Path
import scripted
from paceline.system import fault_points
from paceline.errors import WorkerLost

number, done, reach = os.environ["PACELINE_WORKER"], Path(os.environ["PACELINE_RUN"], "done"), fault_points.reach

def reach_or_lose(point, step=None):
    if (number, point) == ("0", "between reduction and update") and session.position == 6 and session.workers == 3:
        scripted.wait_until(done.exists, "rank 1")
        raise WorkerLost("lost before the update")
    reach(point, step)

fault_points.reach = reach_or_lose
session = scripted.begin(trackers="csv")
for batch in session.batches(steps={STEPS}):
    report = session.step(batch)
    scripted.say(session, report)
    session.log({{"twice": 2 * report.loss}})
    if (number, report.step) == ("1", 6):
        done.touch()
scripted.end(session)
"""


def test_a_step_that_rank_0_took_over_from_another_one(run: Run) -> None:
    ran = run(BEHIND, "-n", 3, "--elastic", "2:3", faults=faults.kill(rank=2, step=6, point="after update"))
    assert ran.code == 0, ran.report()
    assert ran.survivors() == [0, 1], ran.report()
    of_rank_0 = [event for event in ran.events("rank-0") if event["event"] == "step"]
    assert [event["step"] for event in of_rank_0] == list(range(STEPS))
    found = rows(folder_of(ran))
    assert [found["loss", step] for step in range(STEPS)] == [[repr(event["loss"])] for event in of_rank_0]
    assert all(float(found["twice", step][0]) == 2 * float(found["loss", step][0]) for step in range(STEPS))
