"""The learning rate of a batch that grows with the workers."""

import math

import pytest

from paceline.settings import Settings
from paceline.step.optimizer import Scaling, scaling_of


def test_a_fixed_batch_needs_no_scaling() -> None:
    scaling = scaling_of(Settings(batch=64), 8)
    assert (scaling.factor, scaling.reason) == (1.0, "")
    assert [scaling.at(step) for step in range(3)] == [1.0] * 3


@pytest.mark.parametrize(("kind", "factor"), [("linear", 6.0), ("sqrt", math.sqrt(6))])
def test_the_factor(kind: str, factor: float) -> None:
    settings = Settings.model_validate({"batch_per_worker": 32, "scale_lr": kind})
    scaling = scaling_of(settings, 6)
    assert scaling.factor == factor
    assert scaling.at(0) == factor
    assert f"({kind})" in scaling.reason
    assert "6 workers x 32 = 192" in scaling.reason


def test_a_warm_up_rises_evenly_to_the_factor_and_stays() -> None:
    scaling = Scaling(factor=5.0, warmup_steps=4)
    assert [scaling.at(step) for step in range(6)] == [2.0, 3.0, 4.0, 5.0, 5.0, 5.0]


def test_one_worker_is_not_scaled() -> None:
    settings = Settings(batch_per_worker=32, scale_lr="linear", warmup_steps=10)
    assert [scaling_of(settings, 1).at(step) for step in (0, 5, 50)] == [1.0] * 3
