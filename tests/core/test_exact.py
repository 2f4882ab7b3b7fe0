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
WAYS = [(5, False), *((workers, True) for workers in range(1, 9)), (2, False)]


@pytest.fixture(scope="module")
def alone(printed: Printed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process found for all cases."""
    (found,) = printed(SCRIPT, 1, tmp_path_factory.mktemp("alone"), environment={"STRATEGY": "single"}, deadline=200)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "one_machine"),
    WAYS,
    ids=[f"{workers}{'' if shared else ' over the network'}" for workers, shared in WAYS],
)
def test_the_bits_do_not_depend_on_the_workers(
    workers: int, one_machine: bool, alone: dict[str, Any], printed: Printed, tmp_path: Path
) -> None:
    environment = {"STRATEGY": "allreduce"}
    everyone = printed(SCRIPT, workers, tmp_path, one_machine=one_machine, environment=environment, deadline=200)
    for case in CASES:
        assert [one[case]["shared"] for one in everyone] == [one_machine and workers > 1] * workers, case
        for one in everyone:
            assert one[case]["steps"] == steps_of(case), case
            assert one[case]["losses"] == alone[case]["losses"], case
            assert one[case]["fingerprint"] == alone[case]["fingerprint"], case


RECOMPUTED = """
from subjects import CASES, tell, train
for name in ("transformer, tied weights, clipping, schedule", "transformer, recomputed"):
    tell(**{name: train(CASES[name]() | {"exact": True}, 10)["fingerprint"]})
"""


def test_recomputing_does_not_change_the_bits(printed: Printed, tmp_path: Path) -> None:
    (fingerprints,) = printed(RECOMPUTED, 1, tmp_path)
    kept, again = fingerprints.values()
    assert kept == again
