"""What a script may do with a parameter whose values another worker of the pipeline has."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.errors import InputError
from paceline.strategies.pipeline.release import Released


@pytest.fixture
def weight() -> torch.Tensor:
    layer = nn.Linear(3, 2)
    model = nn.Sequential(layer)
    released = Released(model, torch.optim.SGD(model.parameters()), {"0.bias"}, {"0.bias"})
    released.release()
    return layer.weight


def test_it_has_its_shape(weight: torch.Tensor) -> None:
    assert weight.shape == weight.size() == (2, 3) and weight.numel() == 6 and weight.dim() == weight.ndim == 2
    assert torch.zeros_like(weight).shape == weight.new_zeros(weight.shape).shape == (2, 3)
    assert weight.untyped_storage().nbytes() == 0 and weight.grad is None and isinstance(weight, nn.Parameter)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.clamp_(-1, 1),
        lambda weight: weight.add_(torch.randn_like(weight)),
        lambda weight: weight.data.mul_(torch.rand(weight.shape)),
        lambda weight: weight[0].normal_(),
        lambda weight: nn.init.kaiming_uniform_(weight),
        lambda weight: weight.__setitem__(..., 0.5),
    ],
)
def test_a_change_draws_the_numbers_that_it_draws_where_the_values_are(
    weight: torch.Tensor, change: Callable[[torch.Tensor], object]
) -> None:
    drawn = []
    for one in (weight, nn.Parameter(torch.ones(2, 3))):
        torch.manual_seed(1)
        with torch.no_grad():
            change(one)
        drawn.append(torch.rand(()))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    "read",
    [
        lambda weight: weight.norm(),
        lambda weight: weight.detach().pow(2).sum(),
        lambda weight: weight.data[0, 0].item(),
        lambda weight: bool((weight > 0).any()),
        lambda weight: torch.ones(2, 3).lerp_(weight.data, 0.1),
        lambda weight: torch.ones(2, 3).copy_(weight),
        lambda weight: weight.tolist(),
        copy.deepcopy,
    ],
)
def test_its_values_cannot_be_read(weight: torch.Tensor, read: Callable[[torch.Tensor], object]) -> None:
    with torch.no_grad(), pytest.raises(InputError, match=r"reads the parameter '0.weight'.*session.model_state"):
        read(weight)


def test_it_is_an_ordinary_parameter_when_it_is_allocated() -> None:
    model = nn.Linear(3, 2)
    released = Released(model, torch.optim.SGD(model.parameters()), {"bias"}, {"bias"})
    released.release()
    released.allocate()
    assert type(model.weight) is nn.Parameter and model.weight.add(1).shape == (2, 3)
