"""Links that seem slow are measured again; who is late once by chance still gets an equal share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.comm.reduction import choice
from paceline.events import EventLog

CAPABILITIES = SimpleNamespace(ordered=False)
FOUR_MACHINES: Any = SimpleNamespace(
    link_shares=None, hosts=[(rank,) for rank in range(4)], transport=SimpleNamespace(capabilities=CAPABILITIES)
)


@pytest.mark.parametrize(
    ("measured", "asked", "equal"),
    [
        ([[1.0, 1.0, 0.9, 1.0]], 1, True),
        ([[1.0, 0.5, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]], 2, True),
        ([[1.0, 0.5, 1.0, 1.0], [0.4, 0.5, 1.0, 1.0], [1.0, 0.5, 1.0, 0.4]], 3, False),
    ],
    ids=["alike", "late by chance", "slow"],
)
def test_a_link_that_seems_slow(
    measured: list[list[float]], asked: int, equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = iter(measured)
    monkeypatch.setattr(choice, "measure_links", lambda world: next(rates))
    monkeypatch.setattr(FOUR_MACHINES, "link_shares", None)
    shares = choice._link_shares(FOUR_MACHINES, choice._WORTH_MEASURING, EventLog(None, 0))
    assert len(measured) - len(list(rates)) == asked
    if equal:
        assert shares == []
    else:
        assert shares[1] < shares[0] == shares[2] == shares[3]
