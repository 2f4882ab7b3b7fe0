"""Workers on devices are lost: a spare gets its device when it joins; the bits stay those of the CPU."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
from launching import Run

from paceline.testing import faults
from paceline.testing.faults import Point

STEPS = 10
SCRIPT = f"""
import os
import scripted

if "ALONE" not in os.environ and "GPUS" in os.environ:
    import accelerator

    accelerator.install(*os.environ["GPUS"].split())
session = scripted.begin()
world = session._context.world
for batch in session.batches(steps={STEPS}):
    scripted.refill(session, 3)
    scripted.say(session, session.step(batch))
kinds = sorted({{value.device.type for value in session._context.compute.model.state_dict().values()}})
scripted.end(session, device=str(world.device), kinds=kinds, transport=type(world.transport).__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "seats"),
    [
        ("a b c", ["standin:0", "standin:1", "standin:2"]),
        pytest.param("a", ["standin:0"] * 3, marks=pytest.mark.slow),
    ],
    ids=["one each", "one for all"],
)
def test_a_spare_takes_the_free_device(run: Run, undisturbed: Any, gpus: str, seats: list[str]) -> None:
    alone = undisturbed(SCRIPT)
    killed = faults.kill(rank=0, step=4, point="inside the collective")
    ran = run(SCRIPT, "-n", 3, "--elastic", "1:3", "--standby", 1, faults=killed, GPUS=gpus)
    assert ran.code == 0, ran.report()
    told = ran.printed()
    assert {one["fingerprint"] for one in told} == {alone["fingerprint"]}, ran.report()
    assert sorted(one["device"] for one in told) == seats, ran.report()
    assert {json.dumps(one["kinds"]) for one in told} == {'["standin"]'}
    assert {one["transport"] for one in told} == {"_OverGloo" if len(gpus) > 1 else "ThroughHost"}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("standbys", [0, 1])
@pytest.mark.parametrize(
    "point", ["before forward", "inside the collective", "between reduction and update", "after update"]
)
def test_a_kill_of_one_of_three_on_one_gpu(run: Run, undisturbed: Any, point: Point, standbys: int) -> None:
    """The others go on with its bits; a spare takes the same GPU when it joins."""
    one_gpu = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    killed = faults.kill(rank=0, step=4, point=point)
    ran = run(SCRIPT, "-n", 3, "--elastic", "1:3", "--standby", standbys, faults=killed, deadline=300.0, **one_gpu)
    assert ran.code == 0, ran.report()
    told = ran.printed()
    assert len(told) == 3, ran.report()
    assert {one["fingerprint"] for one in told} == {undisturbed(SCRIPT, **one_gpu)["fingerprint"]}, ran.report()
    assert {(one["device"], *one["kinds"], one["transport"]) for one in told} == {("cuda:0", "cuda", "ThroughHost")}
