"""Every strategy on a transport that behaves as NCCL: the bits of shared memory, or a clear refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

PAGE = Path(__file__).parents[2] / "docs" / "gpus.md"
REFUSED = ("parameter-server", "hogwild")
SCRIPT = """
import os
import paceline
import ordered_transport
from subjects import CASES, tell

ways, ordered = eval(os.environ["GIVEN"])
if ordered:
    ordered_transport.use()
for settings in ways:
    try:
        session = paceline.start(**CASES["batch norm, dropout, short batch"]() | settings)
        for batch in session.batches(steps=4):
            session.step(batch)
        tell(**{repr(settings): session.fingerprint()})
    except paceline.ConfigError as error:
        tell(**{repr(settings): str(error)})
"""
ALIKE: list[dict[str, Any]] = [
    {"exact": True},
    {"exact": False, "reduction": "tree"},
    {"exact": False},
    {"exact": True, "strategy": "stealing"},
    {"strategy": "local-sgd"},
    {"strategy": "pipeline", "pipeline": {"schedule": "pipedream", "cut": ["3"]}},
    {"strategy": "pipeline", "pipeline": {"schedule": "2bw", "cut": ["3"]}},
]


def test_the_bits_are_those_of_shared_memory(printed: Printed, tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    usual = printed(SCRIPT, 2, tmp_path / "memory", environment={"GIVEN": repr((ALIKE, False))})
    ordered = printed(SCRIPT, 2, tmp_path, environment={"GIVEN": repr((ALIKE, True))})
    assert ordered == usual
    assert all(len(one) == len(ALIKE) for one in ordered)
    assert all(len(value) == 64 for one in ordered for value in one.values()), ordered


def test_what_the_page_lists_is_refused(printed: Printed, tmp_path: Path) -> None:
    ways = [{"strategy": strategy} for strategy in REFUSED]
    for found in printed(SCRIPT, 2, tmp_path, environment={"GIVEN": repr((ways, True))}):
        for settings in ways:
            assert "use " in found[repr(settings)] and "'allreduce'" in found[repr(settings)]
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [f"strategy={strategy}" for strategy in REFUSED]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("settings", [{"strategy": "backup", "backup": {"workers": 1}}, {"strategy": "stealing"}])
def test_who_computes_what_depends_on_time(printed: Printed, tmp_path: Path, settings: dict[str, Any]) -> None:
    everyone = printed(SCRIPT, 2, tmp_path, environment={"GIVEN": repr(([settings], True))})
    assert len({one[repr(settings)] for one in everyone}) == 1
