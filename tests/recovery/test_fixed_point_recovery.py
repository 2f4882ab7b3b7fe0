"""With ``exact="fixed-point"`` the bits are those of an undisturbed run, whoever is lost, joins or stops, and when."""

import json
from typing import Any

import pytest
from launching import Run
from test_join_and_leave import DOWN_TO_ONE, JOINED
from test_recovery import AT, ELASTIC, MORE, OVER_THE_NETWORK, PLAIN, STEPS, check

from paceline.testing import faults
from paceline.testing.faults import Point

FIXED = {"GIVEN": json.dumps({"exact": "fixed-point"})}
WAYS = {"memory": "", "network": OVER_THE_NETWORK, "collective": ""}


def given(way: str) -> dict[str, str]:
    more = {"reduction": "collective"} if way == "collective" else {}
    return {"GIVEN": json.dumps({"exact": "fixed-point"} | more)}


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("point", ["inside the collective", "between reduction and update", "in evaluate"])
def test_a_kill_at_each_point(run: Run, undisturbed: Any, point: Point, victim: int) -> None:
    ran = run(MORE, *ELASTIC, faults=faults.kill(rank=victim, step=AT[point], point=point), **FIXED)
    check(ran, undisturbed(MORE, **FIXED), 2)
    assert ran.saved()[-1] == STEPS


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize(
    ("way", "point"),
    [
        ("memory", "inside the collective"),
        ("network", "between reduction and update"),
        ("collective", "inside the collective"),
    ],
)
def test_a_kill_in_the_step_that_finds_the_units(run: Run, undisturbed: Any, way: str, point: Point) -> None:
    """It is computed twice in any case."""
    ran = run(WAYS[way] + PLAIN, *ELASTIC, faults=faults.kill(rank=1, step=0, point=point), **given(way))
    check(ran, undisturbed(PLAIN, **FIXED), 2)
    assert [one for one in ran.events() if one["event"] == "repeated"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["memory", "network"])
def test_down_to_one_and_up_again(run: Run, undisturbed: Any, way: str) -> None:
    """One that joins takes over the units."""
    ran = run(WAYS[way] + DOWN_TO_ONE, *ELASTIC, arguments=(4,), **FIXED)
    check(ran, undisturbed(JOINED, (4,), **FIXED), 2)
    assert [0] in ran.memberships()
    assert len(ran.memberships()[-1]) >= 2, ran.report()


@pytest.mark.slow(turns=6)
def test_stealing(run: Run, undisturbed: Any) -> None:
    script = {"GIVEN": json.dumps({"exact": "fixed-point", "strategy": "stealing"})}
    ran = run(PLAIN, *ELASTIC, faults=faults.kill(rank=1, step=5), **script)
    check(ran, undisturbed(PLAIN, **FIXED), 2)
