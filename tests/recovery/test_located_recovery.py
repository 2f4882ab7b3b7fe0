"""The loss of workers that have shards: training goes on if others have them, and stops with their names if not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from launching import Run

from paceline.testing import faults

SCRIPT = """
import json, os, random, time
from functools import partial
from pathlib import Path
import paceline, scripted, torch
from paceline.data import Located
from paceline.environments import env
from subjects import mlp

held = "abcdef"
if "HELD" in os.environ:  # by worker, not by rank: one that takes the place of another has other shards
    held = json.loads(os.environ["HELD"]).get(str(env.launch_info().worker), "ab")
sizes = dict(a=40, b=7, c=90, d=12, e=64, f=21, g=5)  # g is no shard of the run
every = {name: torch.randn(size, 12, generator=torch.Generator().manual_seed(size)) for name, size in sizes.items()}
class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows
    def __iter__(self):
        for row, label in random.sample(self.rows, len(self.rows)):
            yield row + 0.1 * torch.rand(12), label

as_given = Stream if "STREAMS" in os.environ else list
data = Located(
    {name: as_given([(row, int(row[:4].argmax())) for row in every[name]]) for name in sizes if name in held},
    move=os.environ.get("MOVE", "never"), wait_seconds=float(os.environ.get("WAIT", 0)),
    lost=os.environ.get("LOST", "stop"),
)
if env.launch_info() is not None and env.launch_info().worker > 1 and "WAIT" in os.environ:
    events = Path(os.environ["PACELINE_RUN"], "events")
    while sum(one.read_text().count('"membership"') for one in events.glob("launcher*")) < 2:  # met without it
        time.sleep(0.05)
torch.manual_seed(0)
session = paceline.start(
    model=mlp(), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), loss=torch.nn.functional.cross_entropy,
    data=data, batch=32, exact="LOST" not in os.environ, timeout_seconds=30,
    strategy=os.environ.get("STRATEGY", "allreduce"),
    checkpoint={"every": None if "ALONE" in os.environ else 4, "keep": 99, "background": False},
)

def total(shard):
    return torch.stack([row for row, _ in shard]).sum().item()

for batch in session.batches(epochs=2):
    if "g" in os.environ.get("HELD", "") and batch.step >= 8:
        scripted.await_refused(session)
    if "JOINS" in os.environ and batch.step >= 7:
        scripted.refill(session, 3)
    scripted.say(session, session.step(batch))
    if batch.step == 4 and "STREAMS" not in os.environ:  # after which a worker is lost, with what it has computed
        assert session.map(total, data) == [every[name].sum().item() for name in "abcdef"]
scripted.end(session)
"""


@pytest.mark.slow
def test_a_run_survives_with_copies_and_stops_without(run: Run, undisturbed: Any) -> None:
    """It stops within an epoch, in the middle of shards, and goes on from there on workers with other shards."""
    alone = undisturbed(SCRIPT)
    copies = {"0": "abcd", "1": "cdef", "2": "efab"}
    lost = faults.kill(rank=1, step=5, point="in evaluate") + faults.kill(rank=0, step=6)
    killed = run(SCRIPT, "-n", 3, "--elastic", "1:3", faults=lost, HELD=json.dumps(copies), STRATEGY="stealing")
    assert killed.code == 2, killed.report()
    assert "No worker still has these shards of the data: 'c' of rank" in killed.said, killed.report()
    assert (killed.run / "checkpoints" / "step-000006").exists(), killed.report()  # saved before the end
    resumed = run(SCRIPT, "-n", 2, "--resume", "auto", HELD=json.dumps({"0": "abc", "1": "def"}), name="one")
    assert resumed.code == 0, resumed.report()
    assert {one["fingerprint"] for one in resumed.printed()} == {alone["fingerprint"]}, resumed.report()


@pytest.mark.slow
def test_streams_go_on_where_they_were(run: Run, undisturbed: Any) -> None:
    """A holder of two streams is lost, another joins, and a resume in the middle of the streams has other holders."""
    alone = undisturbed(SCRIPT, STREAMS="1")
    lost = faults.kill(rank=1, step=5) + faults.kill(rank=0, step=13)
    held = json.dumps({"0": "abcd", "1": "cdef", "2": "efab", "3": "ae"})
    given = {"HELD": held, "STREAMS": "1", "MOVE": "samples", "JOINS": "1"}
    killed = run(SCRIPT, "-n", 3, "--elastic", "1:3", faults=lost, **given)
    assert killed.code == 2, killed.report()
    joined = [killed.steps(name)[0] for name in killed.logs if name == "worker-3"]
    assert len(joined) == 1 and 5 < joined[0] < 13, killed.report()
    assert "No worker still has these shards of the data: 'c' of rank" in killed.said, killed.report()
    others = json.dumps({"0": "abc", "1": "def"})
    resumed = run(SCRIPT, "-n", 2, "--resume", "auto", HELD=others, STREAMS="1", name="one")
    assert resumed.code == 0, resumed.report()
    assert {one["fingerprint"] for one in resumed.printed()} == {alone["fingerprint"]}, resumed.report()


@pytest.mark.slow
def test_another_holder_sends_if_one_is_lost_while_it_sends(run: Run, undisturbed: Any) -> None:
    """A worker without a shard gets the samples of step 5 from one holder, and after its loss from the other."""
    alone = undisturbed(SCRIPT)
    held = json.dumps({"0": "abcdef", "1": "abcdef", "2": "", "3": ""})
    lost = faults.kill(rank=0, step=5, point="sending samples")
    killed = run(SCRIPT, "-n", 3, "--elastic", "1:3", faults=lost, HELD=held, MOVE="samples")
    assert killed.code == 0, killed.report()
    recovered = [(one["step"], one["lost"]) for one in killed.events() if one["event"] == "recovered"]
    assert (4, [0]) in recovered, killed.report()  # step 5 was sent ahead of step 4
    sent = {one["step"] for one in killed.events() if one["event"] == "samples-sent"}
    assert sent == {*range(16)}, killed.report()
    assert {one["fingerprint"] for one in killed.printed()} == {alone["fingerprint"]}, killed.report()


@pytest.mark.slow
def test_workers_wait_for_a_worker_that_has_a_lost_shard(run: Run, undisturbed: Any) -> None:
    alone = undisturbed(SCRIPT)
    held = {"0": "abcd", "1": "cdef", "2": "ef", "3": "ef"}  # the standby worker, or the one that replaces the lost one
    options = "-n", 2, "--elastic", "1:2", "--standby", 1
    killed = run(SCRIPT, *options, faults=faults.kill(rank=1, step=6), HELD=json.dumps(held), WAIT="60")
    assert killed.code == 0, killed.report()
    assert "waiting at most 60 s (wait_seconds) for shards that no worker still has: 'e' of" in killed.said, (
        killed.report()
    )
    assert killed.memberships() in ([[0, 1], [0], [0, joiner]] for joiner in (2, 3)), killed.report()
    assert {one["fingerprint"] for one in killed.printed()} == {alone["fingerprint"]}, killed.report()


@pytest.mark.slow
def test_a_worker_with_an_unknown_shard_leaves_and_the_run_goes_on(run: Run, undisturbed: Any) -> None:
    alone = undisturbed(SCRIPT)
    held = json.dumps({"0": "abcdef", "1": "abcdef", "2": "abg"})
    killed = run(SCRIPT, "-n", 2, "--elastic", "1:2", faults=faults.kill(rank=1, step=6), HELD=held)
    assert killed.code == 0, killed.report()
    assert "training continues without a worker that was to join. Shard 'g' of rank 1 (" in killed.said, killed.report()
    (noted,) = killed.launcher("not-joined")
    assert "failed: InputError: Shard 'g' of rank 1 (" in noted["reason"], killed.report()
    assert {one["fingerprint"] for one in killed.printed()} == {alone["fingerprint"]}, killed.report()


@pytest.mark.slow
def test_training_goes_on_without_a_lost_shard(run: Run) -> None:
    held = json.dumps({"0": "ace", "1": "bdf", "2": "ac"})
    lost = faults.kill(rank=1, step=6)
    killed = run(SCRIPT, "-n", 2, "--elastic", "1:2", faults=lost, HELD=held, LOST="leave out")
    assert killed.code == 0, killed.report()
    assert "training continues without shards that no worker still has" in killed.said, killed.report()
    samples = {one["step"]: one["samples"] for one in killed.events() if one["event"] == "step"}
    assert sum(samples[step] for step in range(8, 16)) == 40 + 90 + 64, killed.report()  # in the second epoch
