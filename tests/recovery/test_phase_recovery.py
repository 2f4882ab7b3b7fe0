"""A worker is lost in the middle of a batch, between its phases or in one: the others go on to the same bits."""

from typing import Any

import pytest
from launching import Run

STEPS = 6
GAN = """
import json, os
import torch
from torch import nn
import paceline

torch.manual_seed(0)
model = nn.ModuleDict({
    "G": nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 6)),
    "D": nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1)),
})
victim = os.environ.get("PACELINE_WORKER") == "1"

def die(where):
    if victim and "ALONE" not in os.environ and where == os.environ["AT"] and session.position == 3:
        os.kill(os.getpid(), 9)

def loss_d(model, real):
    die("in D")
    fake = model["G"](torch.randn(len(real), 8)).detach()
    return model["D"](fake).mean() - model["D"](real).mean()

def loss_g(model, real):
    die("in G")
    return -model["D"](model["G"](torch.randn(len(real), 8))).mean()

session = paceline.start(
    model=model, forward={"D": loss_d, "G": loss_g}, data=torch.randn(100, 6), batch=32, exact=True,
    optimizer=lambda model: {name: torch.optim.Adam(model[name].parameters(), lr=1e-2) for name in "DG"},
    checkpoint={"every": 2},
)
for batch in session.batches(steps=6):
    session.step(batch, optimizer="D")
    die("between")
    session.step(batch, optimizer="G")
    if batch.step % 2:
        session.step(batch, optimizer="D")
print(json.dumps({"fingerprint": session.fingerprint()}), flush=True)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", ["between", "in G"])
def test_lost_in_the_middle_of_a_batch(run: Run, undisturbed: Any, where: str) -> None:
    ran = run(GAN, "-n", 3, "--elastic", "1:3", AT=where)
    assert ran.code == 0, ran.report()
    assert len(ran.memberships()) > 1 and ran.survivors() == [0, 2], ran.report()
    assert ran.printed() and all(told == undisturbed(GAN, AT=where) for told in ran.printed()), ran.report()
    ran.check_steps(STEPS)


def test_a_resumed_run_has_the_updates_of_all_phases(run: Run, undisturbed: Any) -> None:
    ended = run(GAN.replace("os.kill(os.getpid(), 9)", "raise KeyError('ends')"), "-n", 2, AT="in D")
    assert ended.code != 0 and 2 in ended.saved(), ended.report()
    checkpoint = ended.run / "checkpoints" / "step-000002"
    again = run(GAN, "-n", 3, "--resume", checkpoint, name="two", AT="never")
    assert again.code == 0, again.report()
    assert again.printed() and all(told == undisturbed(GAN, AT="never") for told in again.printed()), again.report()
