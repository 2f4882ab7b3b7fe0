"""The loss scale moves as torch.amp.GradScaler's."""

import math
from typing import Any

from paceline.step.optimizers.loss_scale import LossScale


def test_it_falls_at_an_overflow_and_grows_after_2000_good_steps() -> None:
    state: dict[str, Any] = {}
    scale = LossScale(state)
    assert scale.value == 65536
    assert not scale.observe(math.inf) and not scale.observe(math.nan) and scale.overflowed
    assert scale.value == 16384
    assert all(scale.observe(1.0) for _ in range(1999)) and scale.value == 16384
    again = LossScale(dict(state))  # from a checkpoint
    for one in (scale, again):
        assert one.observe(1.0) and not one.overflowed
        assert one.value == 32768
        assert all(one.observe(1.0) for _ in range(1999)) and not one.observe(math.inf)
        assert one.value == 16384


def test_it_has_a_least_and_a_largest() -> None:
    scale = LossScale({})
    assert not any(scale.observe(math.inf) for _ in range(40)) and scale.value == 1
    assert all(scale.observe(1.0) for _ in range(40 * 2000)) and scale.value == 2**24
