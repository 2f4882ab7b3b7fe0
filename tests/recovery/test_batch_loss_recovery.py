"""A loss over the whole batch survives the loss of a worker in either pass, and is resumed on another number."""

from __future__ import annotations

from typing import Any

import pytest
from launching import Run

from paceline.system.fault_points import Point
from paceline.testing import faults

SCRIPT = """
import os
from batch_losses import start, two_views
from subjects import tell

def encode(model, microbatch):
    rank, at = os.environ.get("RANK"), os.environ.get("ENDS")
    calls[0] += 1
    if at and rank == "1" and calls[0] == int(at) and not os.path.exists(os.environ["MARK"]):
        open(os.environ["MARK"], "w").close()
        os.kill(os.getpid(), 9)
    return two_views(model, microbatch)

calls = [0]
session = start(
    "simclr", exact=True, timeout_seconds=30, strategy=os.environ.get("STRATEGY", "allreduce"), forward=encode,
    checkpoint={"every": None if "ALONE" in os.environ else 2},
)
for batch in session.batches(epochs=3):
    session.step(batch)
tell(fingerprint=session.fingerprint(), position=session.position)
"""
"""A worker has four microbatches of two: two passes over them make eight calls in a step, after probes.

The last stage of a pipeline has eight microbatches: after a call at the start, a step has eight in each pass.
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "point"),
    [
        ("allreduce", "before forward"),
        ("allreduce", "between reduction and update"),
        ("stealing", "before forward"),
        ("sharded", "between reduction and update"),
        ("pipeline", "before forward"),
    ],
)
def test_the_bits_survive_a_loss_and_a_resume(run: Run, undisturbed: Any, strategy: str, point: Point) -> None:
    alone, plan = undisturbed(SCRIPT), faults.kill(rank=1, step=3, point=point)
    killed = run(SCRIPT, "-n", 2, "--elastic", "1:2", "--standby", 1, faults=plan, STRATEGY=strategy)
    assert len(killed.launcher("lost")) == 1
    assert {str(one) for one in killed.printed()} == {str(alone)}, killed.report()
    resumed = run(SCRIPT, "-n", 3, "--resume", killed.run / "checkpoints", name="resumed", STRATEGY=strategy)
    assert resumed.printed() == [alone] * 3, resumed.report()


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "calls"), [("allreduce", (1, 3, 21, 23, 25, 27)), ("pipeline", (68, 78))])
def test_a_loss_in_either_pass(
    run: Run, undisturbed: Any, tmp_path: Any, strategy: str, calls: tuple[int, ...]
) -> None:
    alone = undisturbed(SCRIPT)
    for call in calls:
        mark, more = str(tmp_path / f"mark-{call}"), {"STRATEGY": strategy, "ENDS": str(call)}
        killed = run(SCRIPT, "-n", 2, "--elastic", "1:2", name=f"call-{call}", MARK=mark, **more)
        assert len(killed.launcher("lost")) == 1
        assert {str(one) for one in killed.printed()} == {str(alone)}, killed.report()
