"""Strategies that do not audit say so, and what takes the place of audits."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.settings import Settings
from paceline.strategies.registry import without_audits


@pytest.mark.parametrize(
    ("given", "workers", "says"),
    [
        ({"strategy": "hogwild"}, 2, "strategy 'hogwild' has no audits with 2 workers: nothing looks whether"),
        ({"strategy": "hogwild", "audit": 3}, 2, "audit is set, but without effect: strategy 'hogwild' has no audits"),
        (
            {"strategy": "backup", "backup": {"workers": 1}},
            3,
            "with backup.workers = 1: only the probes before the first",
        ),
        (
            {"strategy": "parameter-server", "backup": {"workers": 1}},
            3,
            "with backup.workers = 1: nothing looks whether",
        ),
    ],
    ids=str,
)
def test_it_is_said(given: dict[str, Any], workers: int, says: str) -> None:
    assert says in without_audits(Settings(batch=8, **given), workers, given)


@pytest.mark.parametrize(
    ("given", "workers"),
    [
        ({"strategy": "hogwild"}, 1),
        ({"strategy": "hogwild", "audit": "off"}, 2),
        ({"strategy": "backup", "backup": {"workers": 0}}, 3),
        *(({"strategy": name}, 2) for name in ("allreduce", "stealing", "local-sgd", "pipeline", "parameter-server")),
    ],
    ids=str,
)
def test_nothing_is_said(given: dict[str, Any], workers: int) -> None:
    assert without_audits(Settings(batch=8, **given), workers, given) == ""
