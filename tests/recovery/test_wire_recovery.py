"""Formats on the wire with ``exact``: the bits of an undisturbed run, whoever is lost or joins, and when."""

import json
from typing import Any

import pytest
from launching import Run
from test_join_and_leave import DOWN_TO_ONE, JOINED
from test_recovery import ELASTIC, OVER_THE_NETWORK, PLAIN, check

from paceline.testing import faults
from paceline.testing.faults import Point

WAYS = {"memory": "", "network": OVER_THE_NETWORK}


def given(wire: str, **more: str) -> dict[str, str]:
    return {"GIVEN": json.dumps({"exact": True, "wire": wire} | more)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "point", "wire"),
    [
        ("memory", "inside the collective", "bfloat16"),
        ("network", "between reduction and update", "bfloat16"),
        ("network", "inside the collective", "float16"),
        ("memory", "between reduction and update", "int8"),
    ],
)
def test_a_kill_in_the_step_that_finds_the_scales(
    run: Run, undisturbed: Any, way: str, point: Point, wire: str
) -> None:
    ran = run(WAYS[way] + PLAIN, *ELASTIC, faults=faults.kill(rank=1, step=0, point=point), **given(wire))
    check(ran, undisturbed(PLAIN, **given(wire)), 2)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "wire"), [("network", "float16"), ("memory", "int4")])
def test_down_to_one_and_up_again(run: Run, undisturbed: Any, way: str, wire: str) -> None:
    """A worker that joins takes over the scales."""
    ran = run(WAYS[way] + DOWN_TO_ONE, *ELASTIC, arguments=(4,), **given(wire))
    check(ran, undisturbed(JOINED, (4,), **given(wire)), 2)
    assert [0] in ran.memberships()
    assert len(ran.memberships()[-1]) >= 2, ran.report()


# every parameter has more bits after the first, third and fifth step
RAISED = """
from paceline.step.gradients import thermostat
thermostat.EVERY, thermostat._LEAST = 2, 1e9
"""


@pytest.mark.slow(turns=8)
@pytest.mark.parametrize("strategy", ["allreduce", "sharded"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("step", [2, 3])
def test_more_bits(run: Run, undisturbed: Any, way: str, strategy: str, step: int) -> None:
    """A worker is lost in the step that decides, or in the first one with more bits."""
    plan = faults.kill(rank=1, step=step, point="between reduction and update")
    ran = run(WAYS[way] + RAISED + PLAIN, *ELASTIC, faults=plan, **given("int-auto", strategy=strategy))
    check(ran, undisturbed(RAISED + PLAIN, **given("int-auto")), 2)


@pytest.mark.slow
def test_stealing(run: Run, undisturbed: Any) -> None:
    ran = run(PLAIN, *ELASTIC, faults=faults.kill(rank=1, step=5), **given("int8", strategy="stealing"))
    check(ran, undisturbed(PLAIN, **given("int8")), 2)


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["topk", "onebit"])
def test_what_was_not_sent_outlives_its_worker(run: Run, undisturbed: Any, wire: str) -> None:
    """The lanes of a lost worker are computed again from the last point, and go to the other workers."""
    often = "from paceline.step.gradients import lane_memory\nlane_memory.POINT_STEPS = 2\n"
    ran = run(often + PLAIN, *ELASTIC, faults=faults.kill(rank=1, step=5, point="inside the collective"), **given(wire))
    check(ran, undisturbed(PLAIN, **given(wire)), 2)


@pytest.mark.slow
def test_what_was_not_sent_goes_down_to_one_worker_and_up_again(run: Run, undisturbed: Any) -> None:
    ran = run(OVER_THE_NETWORK + DOWN_TO_ONE, *ELASTIC, arguments=(4,), **given("topk"))
    check(ran, undisturbed(JOINED, (4,), **given("topk")), 2)
    assert [0] in ran.memberships()
    assert len(ran.memberships()[-1]) >= 2, ran.report()
