"""Norms of gradients that were taken as they came are those of all gradients together, or are taken again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.step import optimizer
from paceline.step.optimizer import OptimizerStep, Scaling


@pytest.fixture
def update() -> OptimizerStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200), nn.LayerNorm(200), nn.Linear(200, 10))
    made = OptimizerStep(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), None, 1.0, Scaling())
    for value in made.parameters.values():
        value.grad = torch.randn_like(value)
    return made


def gradients(update: OptimizerStep) -> list[torch.Tensor]:
    return [value.grad for value in update.parameters.values() if value.grad is not None]


def test_the_bits_are_the_same_and_no_norm_is_taken_twice(
    update: OptimizerStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, taken = update.norm(), list[int]()
    take: Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]] = optimizer.foreach_norm

    def counted(values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        taken.append(len(values))
        return take(values)

    monkeypatch.setattr(optimizer, "foreach_norm", counted)
    everyone = gradients(update)
    update.measure(everyone[4:])
    update.measure(everyone[1:4])
    assert torch.equal(update.norm(), expected)
    assert taken == [2, 3, 1]
    assert torch.equal(update.norm(), expected)
    assert taken == [2, 3, 1, 6]


def test_what_has_changed_is_measured_again(update: OptimizerStep) -> None:
    first, second, *_ = everyone = gradients(update)
    update.measure(everyone)
    first.mul_(3.0)
    next(iter(update.parameters.values())).grad = None
    second.add_(1.0)
    changed = update.norm()
    assert torch.equal(changed, update.norm())
    update.measure(gradients(update))
    assert torch.equal(update.norm(without=[1, 2]), update.norm(without=[1, 2]))
    update.measure(gradients(update))
    for gradient in gradients(update):
        gradient.zero_()
    assert update.norm() == 0.0
