"""A run that is killed at any moment goes on from its newest checkpoint, on any number of workers, to the same bits."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.testing.ranks import Ended, Kill

STEPS = 36
# HELD: a step after which some ranks wait for their end, so that nobody trains on when the kill comes late
SCRIPT = """
import json, os, time
from pathlib import Path
import torch
from torch.optim.lr_scheduler import StepLR
import paceline
from subjects import CASES, tell

if os.environ["RANK"] == "0" and "DYING" in os.environ:
    # end as in a power cut, before or after this call of this function
    from paceline.checkpoint import files
    from paceline.checkpoint.storage import folder
    name, call, when = os.environ["DYING"].split()
    home = {"rename": Path, "write_part": files}.get(name, folder)
    function, calls = getattr(home, name), []
    def deadly(*arguments):
        if name != "rename" or arguments[0].name.startswith(".partial") and not arguments[1].name.startswith(".trash"):
            calls.append(arguments)
        if len(calls) == int(call) and when == "before":
            os.kill(os.getpid(), 9)
        value = function(*arguments)
        if len(calls) == int(call):
            os.kill(os.getpid(), 9)
        return value
    setattr(home, name, deadly)

given = CASES["batch norm, dropout, short batch"]()
session = paceline.start(
    **given,
    exact=True,
    schedule=lambda optimizer: StepLR(optimizer, 9, 0.7),
    checkpoint={"directory": os.environ["SAVED"], "every": 3},
    resume="auto",
    timeout_seconds=60,
)
start = session.position
held_at, held = json.loads(os.environ.get("HELD", "[-1, []]"))
drawn = []
for epoch in range(STEPS // 4):
    for batch in session.batches(epochs=1):
        drawn.append(torch.rand(()).item())
        report = session.step(batch)
        print("step", report.step, report.samples, flush=True)
        if report.step == held_at and int(os.environ["RANK"]) in held:
            time.sleep(50)
tell(start=start, fingerprint=session.fingerprint(), loss=report.loss.hex(), drawn=drawn[-1], samples=report.samples)
""".replace("STEPS", str(STEPS))

Run = Callable[..., list[Ended]]
Printed = Callable[..., list[dict[str, Any]]]
Train = Callable[..., list[dict[str, Any]]]
KILLED = ["SIGKILL"]


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, str]:
    return {"SAVED": str(tmp_path / "saved")}


@pytest.fixture(scope="module")
def uninterrupted(printed: Printed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What comes out on one worker that nobody kills."""
    directory = tmp_path_factory.mktemp("whole")
    (result,) = printed(SCRIPT, 1, directory, environment={"SAVED": str(directory / "saved")})
    assert result.pop("start") == 0
    return result


def held(step: int, ranks: Sequence[int]) -> dict[str, str]:
    """For ranks that are killed when a step is done: a few steps later they wait for it."""
    return {"HELD": json.dumps([step + 3, list(ranks)])}


def check_the_end(results: list[dict[str, Any]], started_from: range, uninterrupted: dict[str, Any]) -> None:
    for result in results:
        assert result.pop("start") in started_from
        assert result == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(3, 2, 4), (2, 5, 1), (1, 4, 2)], ids=str)
def test_killed_twice(
    ranks: Run, printed: Printed, tmp_path: Path, saved: Any, uninterrupted: Any, workers: tuple[int, int, int]
) -> None:
    first, second, third = workers
    own = saved | held(6 + first, range(first))
    ended = ranks(SCRIPT, first, tmp_path, environment=own, kill=Kill(f"step {6 + first}"))
    assert [one.signal for one in ended] == KILLED * first
    own = saved | held(18 + second, range(second))
    ended = ranks(SCRIPT, second, tmp_path, environment=own, kill=Kill(f"step {18 + second}", by=second - 1))
    assert [one.signal for one in ended] == KILLED * second
    last = printed(SCRIPT, third, tmp_path, environment=saved)
    check_the_end(last, range(15, STEPS), uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    ["write_part 2 before", "_write_synced 3 before", "rename 2 before", "rename 2 after", "_write_synced 4 after"],
)
def test_killed_while_saving(
    ranks: Run, printed: Printed, tmp_path: Path, saved: Any, uninterrupted: Any, moment: str
) -> None:
    ended = ranks(SCRIPT, 2, tmp_path, environment=saved | {"DYING": moment})
    assert [one.signal for one in ended] == ["SIGKILL", ""]
    assert "WorkerLost" in ended[1].err
    results = printed(SCRIPT, 3, tmp_path, environment=saved)
    check_the_end(results, range(3, 7), uninterrupted)
    left = {path.name for path in (tmp_path / "saved").iterdir()}
    assert left == {"step-000033", "step-000036", "latest"}


# A state of some megabytes; the third save is killed at a moment drawn anew for each start.
SAVING = """
import os, random, threading, time
import torch
import paceline
from paceline.checkpoint import save
from subjects import tell

at, before, begun = random.Random(os.environ.get("MOMENT")).uniform(0, 1.2), save.save, []

def deadly(folder, snapshot, *others):
    begun.append(time.perf_counter())
    os.write(1, f"saving {snapshot.step}\\n".encode())  # in one group: the training thread prints, too
    if len(begun) == 3 and "MOMENT" in os.environ:
        threading.Timer(at * (begun[1] - begun[0]), os.kill, (os.getpid(), 9)).start()
    return before(folder, snapshot, *others)

save.save = deadly
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randn(64, 1))
session = paceline.start(
    model=torch.nn.Sequential(torch.nn.Linear(16, 20_000), torch.nn.Tanh(), torch.nn.Linear(20_000, 1)),
    optimizer=torch.optim.AdamW,
    loss=torch.nn.functional.mse_loss,
    data=data,
    batch=16,
    exact=True,
    checkpoint={"directory": os.environ["SAVED"], "every": 2},
    resume="auto",
)
print("start", session.position, flush=True)
for batch in session.batches(steps=48):
    session.step(batch)
if "MOMENT" in os.environ:  # on a busy machine a moment may be long, and little or nothing be left to train
    time.sleep(60 if len(begun) >= 3 else 0)
    os.kill(os.getpid(), 9)
tell(fingerprint=session.fingerprint())
"""


@pytest.mark.slow
@pytest.mark.parametrize("store", ["", "file://"], ids=["path", "url"])
def test_killed_at_random_moments_of_saving(ranks: Run, printed: Printed, tmp_path: Path, store: str) -> None:
    """The run always goes on from a checkpoint no further back than the interval, and ends with the same bits."""
    (whole,) = printed(SAVING, 1, tmp_path, environment={"SAVED": str(tmp_path / "whole")})
    saved = tmp_path / "saved"
    environment = {"SAVED": f"{store}{saved}"}
    least = timed = 0
    for moment in range(4):
        (one,) = ranks(SAVING, 1, tmp_path, environment=environment | {"MOMENT": str(moment)})
        assert one.signal == "SIGKILL", one.err
        timed += one.out.count("saving") >= 3
        said = [line.split() for line in one.out.splitlines()]
        assert int(said[0][1]) >= least
        least = int(said[-1][1]) - 2
    assert timed  # else no kill came at its moment
    (last,) = printed(SAVING, 1, tmp_path, environment=environment)
    assert last == whole
    complete = {path.parts[-3] for path in saved.glob("step-*/*/manifest.json")}
    assert complete == {"step-000046", "step-000048"}
    marks = {path.parts[-3] for path in saved.glob("step-*/*/fenced")} | {".writers"} if store else set()
    assert {path.name for path in saved.iterdir()} - marks == {*complete, "latest"}
