"""Weights that the loop of a pipeline changes between two steps."""

from __future__ import annotations

import pytest

from paceline.errors import InputError
from paceline.settings import Settings
from paceline.strategies.registry import check_loop_changes


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "pipedream", "2bw"])
def test_they_stay_if_microbatches_in_flight_use_them(schedule: str) -> None:
    settings = Settings.model_validate({"batch": 8, "strategy": "pipeline", "pipeline": {"schedule": schedule}})
    check_loop_changes(settings, 1, "0.weight", 3)
    if schedule in ("1f1b", "zb-v"):
        check_loop_changes(settings, 2, "0.weight", 3)
    else:
        with pytest.raises(InputError, match=r"changed the parameter '0.weight' before step 3"):
            check_loop_changes(settings, 2, "0.weight", 3)
