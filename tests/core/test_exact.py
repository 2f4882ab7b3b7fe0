"""With ``exact`` a run has the same bits on any number of workers, whoever adds up what."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

SCRIPT = """
import os
from subjects import CASES, tell, train, unequal_links
given = eval(os.environ["GIVEN"])
if given.pop("unequal", False):
    unequal_links()
for name, arguments in CASES.items():
    tell(**{name: train(arguments() | given)})
"""
COLLECTIVE: dict[str, Any] = {"reduction": "collective", "bucket_megabytes": 0.002}
STEALING: dict[str, Any] = {"strategy": "stealing"}
UNEQUAL = {"unequal": True}
TREE: dict[str, Any] = {"exact": True, "strategy": "allreduce"}
FIXED: dict[str, Any] = {"exact": "fixed-point"}
WAYS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    *(((workers,), TREE) for workers in range(1, 9)),
    *((machines, TREE) for machines in ((1,) * 5, (1, 1), (2, 2), (3, 1), (1, 2, 2))),
    *((machines, TREE | UNEQUAL) for machines in ((1, 1, 1), (2, 1, 2), (1, 1, 1, 1))),
    *(((workers,), FIXED) for workers in range(2, 9)),
    *((machines, FIXED) for machines in ((1, 1, 1), (1, 2, 2), (2, 2), (3, 1))),
    *((machines, FIXED | COLLECTIVE) for machines in ((3,), (5,), (2, 2))),
    *((machines, FIXED | STEALING) for machines in ((4,), (1, 1))),
]
"""The workers of each machine, and what is given."""


@pytest.fixture(scope="module")
def alone(printed: Printed, tmp_path_factory: pytest.TempPathFactory) -> Callable[[object], dict[str, Any]]:
    """What one process found for all cases; each way to add up is run once."""
    known: dict[object, dict[str, Any]] = {}

    def of(exact: object) -> dict[str, Any]:
        if exact not in known:
            given = {"GIVEN": repr({"exact": exact, "strategy": "single"})}
            (known[exact],) = printed(SCRIPT, 1, tmp_path_factory.mktemp("alone"), environment=given, deadline=200)
        return known[exact]

    return of


@pytest.mark.slow(turns=9)
@pytest.mark.parametrize(("machines", "given"), WAYS, ids=lambda value: repr(value).replace("'", ""))
def test_the_bits_do_not_depend_on_who_adds_up(
    machines: tuple[int, ...], given: dict[str, Any], alone: Any, printed: Printed, tmp_path: Path
) -> None:
    environment = {"GIVEN": repr(given)}
    everyone = printed(SCRIPT, sum(machines), tmp_path, machines=machines, environment=environment, deadline=200)
    for case, wanted in alone(given["exact"]).items():
        for one in everyone:
            assert one[case]["shared"] == (len(machines) == 1 < sum(machines)), case
            assert {**one[case], "shared": wanted["shared"]} == wanted, case


RECOMPUTED = """
from subjects import CASES, Block, tell, train
for blocks in ([], [Block]):
    given = CASES["transformer, tied weights, clipping, schedule"]() | {"exact": True, "recompute": blocks}
    tell(**{str(len(blocks)): train(given)["fingerprint"]})
"""


def test_recomputing_does_not_change_the_bits(printed: Printed, tmp_path: Path) -> None:
    (fingerprints,) = printed(RECOMPUTED, 1, tmp_path)
    kept, again = fingerprints.values()
    assert kept == again
