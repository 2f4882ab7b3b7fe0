"""What a checkpoint's state must be before anything is made of it."""

from typing import Any

import pytest

from paceline.checkpoint.encoding import EncodingError
from paceline.checkpoint.load import described

STATE: dict[str, Any] = {
    "groups": [{"lr": 0.1}, {"lr": 0.2}], "run": "a", "strategy_state": {}, "optimizer": "AdamW", "schedule": None,
}  # fmt: skip


def test_a_state_isdescribed() -> None:
    assert described(STATE) == {"the optimizer": "AdamW", "the number of its groups": 2, "a schedule": "none"}
    assert described(STATE | {"schedule": {}})["a schedule"] == "given"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"groups": [{"lr": 0.1, "params": []}]}, "parameter groups"),
        ({"groups": [{"lr": 0.1}, {3: 0.1}]}, "parameter groups"),
        ({"run": 3}, "state of a run"),
        ({"strategy_state": []}, "state of a run"),
    ],
)
def test_what_is_no_state_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(EncodingError, match=why):
        described(STATE | change)
