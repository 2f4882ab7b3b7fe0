"""Norms of gradients that were taken as they came are those of all gradients together, or are taken again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from thread_world import run
from torch import nn

from paceline.step import optimizer
from paceline.step.optimizer import OptimizerStep, Scaling
from paceline.strategies.data_parallel.norms import GlobalNorm


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


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of norms that the update computes together."""
    found: list[int] = []
    take: Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]] = vars(optimizer)["foreach_norm"]

    def counted(values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        found.append(len(values))
        return take(values)

    monkeypatch.setattr(optimizer, "foreach_norm", counted)
    return found


def test_the_bits_are_the_same_and_no_norm_is_taken_twice(update: OptimizerStep, taken: list[int]) -> None:
    expected = update.norm()
    taken.clear()
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


def test_a_bucket_is_measured_again_as_a_whole_and_no_other(update: OptimizerStep, taken: list[int]) -> None:
    everyone = gradients(update)
    update.measure(everyone[4:])
    update.measure(everyone[:4])
    everyone[2].mul_(3.0)
    taken.clear()
    changed = update.norm()
    assert taken == [4]
    assert torch.equal(changed, update.norm())


@pytest.mark.parametrize("missing", [(), (2,), (0, 3), (0, 1, 2, 3)], ids=str)
def test_norms_over_workers_have_the_bits_of_one(missing: tuple[int, ...]) -> None:
    types = [torch.float32, torch.bfloat16, torch.float64, torch.float32]
    chance = torch.Generator().manual_seed(0)
    values = {place: torch.randn(50, generator=chance).to(kind) for place, kind in enumerate(types)}
    given = {place: value for place, value in values.items() if place not in missing}
    norms = [value.norm().double() for value in given.values()]
    expected = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    if norms and torch.float64 not in {value.dtype for value in given.values()}:
        expected = torch.linalg.vector_norm(torch.stack(norms).float())

    def act(world: Any) -> torch.Tensor:
        own = {place: value.norm() for place, value in given.items() if place % 2 == world.rank}
        return GlobalNorm(world).of(own, types)

    for found in run(2, act):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
