"""What a script may do with a parameter whose values another worker of the pipeline has."""

from __future__ import annotations

import copy
import pickle
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


def test_a_layer_may_not_be_called_but_what_contains_layers_may() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return values

    model = Net()
    kept = {"blocks.1.weight", "blocks.1.bias"}
    Released(model, torch.optim.SGD(model.parameters()), kept, kept).release()
    assert model(torch.ones(3)).sum() == 3  # as a stage does, without the layers of the others
    model.blocks[1](torch.ones(3))
    with pytest.raises(InputError, match=r"The layer 'blocks.0' \(Linear\) was called between two steps"):
        model.blocks(torch.ones(3))


def test_it_has_its_shape(weight: torch.Tensor) -> None:
    assert weight.shape == weight.size() == (2, 3) and weight.numel() == 6 and weight.dim() == weight.ndim == 2
    assert torch.zeros_like(weight).shape == weight.new_zeros(weight.shape).shape == (2, 3)
    assert weight.untyped_storage().nbytes() == 0 and weight.grad is None and isinstance(weight, nn.Parameter)


def test_it_has_its_strides_type_and_device(weight: torch.Tensor) -> None:
    assert weight.stride() == (3, 1) and weight.get_device() == -1 and "stride" in dir(weight)
    assert weight.type() == "torch.FloatTensor"


def test_a_conversion_to_what_it_is_gives_it_back(weight: torch.Tensor) -> None:
    layer = nn.Linear(3, 2)
    layer.weight = weight
    assert layer.to("cpu").float().type(torch.float32).weight is weight
    assert weight.to(torch.float32) is weight
    weight.retain_grad()
    with pytest.raises(InputError, match="reads the parameter"):
        layer.double()


def test_another_tensor_may_take_its_shape(weight: torch.Tensor) -> None:
    assert torch.ones(6).view_as(weight).shape == torch.ones(1).expand_as(weight).shape == (2, 3)
    nn.utils.vector_to_parameters(torch.ones(6), [weight])
    nn.init.orthogonal_(weight)


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
        pickle.dumps,
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
