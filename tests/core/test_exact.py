"""With ``exact`` a run has the same bits on any number of workers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from subjects import CASES, steps_of

SCRIPT = """
import os
from subjects import CASES, steps_of, tell, train
for name, arguments in CASES.items():
    exact = {"exact": True, "strategy": os.environ["STRATEGY"]}
    tell(**{name: train(arguments() | exact, steps_of(name))})
"""

Printed = Callable[..., list[dict[str, Any]]]
WAYS = [("allreduce", 5, False)]
MORE = [("allreduce", workers, True) for workers in range(1, 9)] + [("allreduce", 2, False)]


@pytest.fixture(scope="module")
def results(
    printed: Printed, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int, bool], list[dict[str, Any]]]:
    """What each worker found for all cases, for a strategy and a number of workers; each computed once."""
    known: dict[tuple[str, int, bool], list[dict[str, Any]]] = {}

    def of(strategy: str, workers: int, one_machine: bool) -> list[dict[str, Any]]:
        way = strategy, workers, one_machine
        if way not in known:
            directory = tmp_path_factory.mktemp("exact")
            known[way] = printed(
                SCRIPT, workers, directory, one_machine=one_machine, environment={"STRATEGY": strategy}, deadline=200
            )
        return known[way]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "way",
    [*WAYS, *(pytest.param(way, marks=pytest.mark.slow) for way in MORE)],
    ids=lambda way: f"{way[1]}{'' if way[2] else ' over the network'}",
)
def test_the_bits_do_not_depend_on_the_workers(way: tuple[str, int, bool], case: str, results: Any) -> None:
    (alone,) = results("single", 1, True)
    everyone = results(*way)
    assert len(everyone) == way[1]
    assert [one[case]["shared"] for one in everyone] == [way[2] and way[1] > 1] * way[1]
    for one in everyone:
        assert one[case]["steps"] == steps_of(case)
        assert one[case]["losses"] == alone[case]["losses"]
        assert one[case]["fingerprint"] == alone[case]["fingerprint"]


RECOMPUTED = """
from subjects import CASES, tell, train
for name in ("transformer, tied weights, clipping, schedule", "transformer, recomputed"):
    tell(**{name: train(CASES[name]() | {"exact": True}, 10)["fingerprint"]})
"""


def test_recomputing_does_not_change_the_bits(printed: Printed, tmp_path: Path) -> None:
    (fingerprints,) = printed(RECOMPUTED, 1, tmp_path)
    kept, again = fingerprints.values()
    assert kept == again
