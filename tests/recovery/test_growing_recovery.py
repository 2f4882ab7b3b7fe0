"""A replay buffer grows from 32 to 4,096 samples through a kill, a join and a resume on another number of workers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from launching import Ran, Run

from paceline.testing import faults

SCRIPT = """
import json, os
from functools import partial
import paceline, scripted, torch
from paceline.data import Growing
from subjects import mlp, tell

def play(count):
    states = torch.randn(count, 12)
    return [(state, {"class": int(state[:4].argmax()), "number": number}) for number, state in enumerate(states)]

def forward(model, microbatch):
    states, targets = microbatch
    return torch.nn.functional.cross_entropy(model(states), targets["class"])

torch.manual_seed(0)
model = mlp()
buffer = Growing(play(32))
session = paceline.start(
    model=model, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), forward=forward, data=buffer, batch=64,
    exact=True, timeout_seconds=30, **json.loads(os.environ.get("GIVEN", "{}")),
    checkpoint={"every": None if "ALONE" in os.environ else 3, "keep": 99, "background": False},
)
lengths = {}
while len(buffer) < 4096:
    session.extend(play(min(len(buffer), 500, 4096 - len(buffer))))
    for batch in session.batches(steps=4):
        scripted.say(session, session.step(batch))
        if batch.step == 14:
            scripted.refill(session, int(os.environ.get("REFILL", 0)))
        lengths[batch.step] = [batch.epoch, batch.samples, len(buffer)]
scripted.end(session, lengths=lengths)
"""


def check(ran: Ran, alone: dict[str, Any]) -> list[dict[str, Any]]:
    """Each worker has had the same batches and lengths as one process."""
    assert ran.code == 0, ran.report()
    everyone = ran.printed()
    for one in everyone:
        assert one["fingerprint"] == alone["fingerprint"], ran.report()
        assert one["lengths"] == {step: alone["lengths"][step] for step in one["lengths"]}, ran.report()
        assert one["lengths"]["47"] == [9, 64, 4096]
    return everyone


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["allreduce", "sharded", "stealing"])
def test_a_replay_buffer_grows_through_losses(run: Run, undisturbed: Any, strategy: str) -> None:
    """Sharded workers go back to a checkpoint from before two additions, and repeat the steps with what was added."""
    alone = undisturbed(SCRIPT)
    given = json.dumps({"strategy": strategy, **({"shard_copy": False} if strategy == "sharded" else {})})
    lost = faults.kill(rank=1, step=13) + faults.kill(rank=0, step=29)
    killed = run(SCRIPT, "-n", 3, "--elastic", "1:3", faults=lost, GIVEN=given, REFILL="3")
    assert check(killed, alone) and len(killed.launcher("lost")) == 2
    back = [one["step"] for one in killed.events() if one["event"] == "went back"]
    assert {*back} == ({12, 27} if strategy == "sharded" else set()), killed.report()
    resumed = run(SCRIPT, "-n", 2, "--resume", killed.run / "checkpoints" / "step-000021", GIVEN=given, name="resumed")
    for one in check(resumed, alone):
        assert min(map(int, one["lengths"])) == 20, resumed.report()
