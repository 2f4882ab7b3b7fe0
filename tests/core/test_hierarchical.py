"""Several workers on each of several machines: the same bits, and each gradient crosses the network once a machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from subjects import CASES, steps_of

Printed = Callable[..., list[dict[str, Any]]]

SCRIPT = """
import os
from subjects import CASES, steps_of, tell, train
for name, arguments in CASES.items():
    exact = {"exact": True, "strategy": os.environ["STRATEGY"]}
    tell(**{name: train(arguments() | exact, steps_of(name))})
"""
MACHINES = [(2, 2), (3, 1), (1, 2, 2)]


@pytest.fixture(scope="module")
def results(printed: Printed, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """What each worker found for all cases; each computed once."""
    known: dict[tuple[int, ...], list[dict[str, Any]]] = {}

    def of(*machines: int) -> list[dict[str, Any]]:
        if machines not in known:
            strategy = "single" if machines == (1,) else "allreduce"
            directory = tmp_path_factory.mktemp("machines")
            known[machines] = printed(
                SCRIPT, sum(machines), directory, machines=machines, environment={"STRATEGY": strategy}, deadline=200
            )
        return known[machines]

    return of


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("machines", MACHINES, ids=lambda machines: "+".join(map(str, machines)))
def test_the_bits_do_not_depend_on_the_machines(machines: tuple[int, ...], case: str, results: Any) -> None:
    (alone,) = results(1)
    for one in results(*machines):
        assert one[case]["steps"] == steps_of(case)
        assert one[case]["losses"] == alone[case]["losses"]
        assert one[case]["fingerprint"] == alone[case]["fingerprint"]
