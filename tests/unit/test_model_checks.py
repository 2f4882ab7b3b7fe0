"""Before a model is cut: its layers must train as it does, and the loss use its output only."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline.data.feed import MicrobatchGroup
from paceline.errors import InputError
from paceline.partition.cut import layers_of
from paceline.partition.model_checks import check_gradients, check_loss

DATA = torch.linspace(-1, 1, 12).view(4, 3), torch.zeros(4, 2)
PIECE = MicrobatchGroup(range(1), 4, DATA)


def mlp(middle: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), middle or nn.Tanh(), nn.Linear(3, 2))


def compute_of(model: nn.Module, loss: Any = functional.mse_loss) -> Any:
    def forward(module: Any, data: Any) -> torch.Tensor:
        return loss(module(data[0]), data[1])  # type: ignore[no-any-return]

    taken: list[int] = []
    take = lambda value, samples: taken.append(samples)  # noqa: E731

    def loss_of(group: MicrobatchGroup, step: int = 0, model: Any = model) -> tuple[torch.Tensor, None]:
        value = forward(model, group.data)
        take(value, group.samples)
        return value, None

    return SimpleNamespace(
        model=model,
        forward=forward,
        loss_of=loss_of,
        input_of=lambda group: group.data[0],
        precision=nullcontext,
        take=take,
        taken=taken,
    )


class Scale(torch.autograd.Function):
    """Multiplies the gradient by other numbers each time."""

    factors: Any = iter(())

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * next(Scale.factors)


class Unsteady(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return Scale.apply(values)  # type: ignore[no-any-return,no-untyped-call]


def doubled(_: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    """Doubles the gradient of what a module gives."""
    output.register_hook(lambda gradient: 2 * gradient)


def check(model: nn.Module, exact: bool, factors: list[float] | None = None) -> None:
    layers = layers_of(model, DATA[0])
    Scale.factors = iter(factors or [])
    check_gradients(compute_of(model), layers, PIECE, exact, seed=3)


@pytest.mark.parametrize("exact", [True, False])
def test_layers_that_train_as_the_model_are_taken(exact: bool) -> None:
    model = mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check(model, exact)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("exact", [True, False])
def test_what_acts_on_the_whole_model_is_noticed(exact: bool) -> None:
    model = mlp()
    model.register_forward_hook(doubled)
    with pytest.raises(InputError, match=r"the gradient of the parameter '0\.weight' is a tensor of norm .* by layers"):
        check(model, exact)
    model = mlp()
    model.register_forward_hook(lambda _, inputs, output: output + 1)
    with pytest.raises(InputError, match=r"the loss is .* by layers, but .* in one piece"):
        check(model, exact)


@pytest.mark.parametrize("exact", [True, False])
def test_a_model_that_does_not_repeat_its_bits_may_differ_by_rounding(exact: bool) -> None:
    check(mlp(Unsteady()), exact, [1.0, 1.0 + 1e-6, 1.0 + 2e-6, 1.0 + 3e-6])
    with pytest.raises(InputError, match=r"'0\.weight'"):
        check(mlp(Unsteady()), exact, [1.0, 1.5, 1.2, 1.3, 1.4])
    if exact:
        with pytest.raises(InputError, match=r"'0\.weight'"):
            check(mlp(Unsteady()), exact, [1.0, 1.0 + 1e-6, 1.0])


@pytest.mark.parametrize("exact", [True, False])
def test_gradients_of_tied_weights_are_compared_elsewhere(exact: bool) -> None:
    """A hook on the weight sees the gradient of each use where layers are called one by one, and else their sum."""
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(3, 2))
    shared.weight.register_hook(lambda gradient: gradient.sign())
    check(model, exact)
    alone = mlp()
    alone[0].weight.register_hook(lambda gradient: gradient.sign())
    check(alone, exact)


def test_a_loss_of_the_output_alone_is_taken() -> None:
    model = mlp()
    compute = compute_of(model)
    check_loss(compute, PIECE)
    assert compute.taken == [4]
    penalty = compute_of(model, lambda output, target: functional.mse_loss(output, target) + model[2].bias.norm())
    with pytest.raises(InputError, match=r"The loss uses the parameter '2\.bias'"):
        check_loss(penalty, PIECE)


class Counts(nn.Module):
    """Counts its passes, without a use for the number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return values


def by_weight(model: Any) -> None:
    model[2].register_forward_hook(lambda *given: given[2] / (1 + model[0].weight.detach().norm()))


def by_buffer(model: Any) -> None:
    model[2].register_forward_hook(lambda *given: given[2] * model[1].count)


def by_gradient(model: Any) -> None:
    model[0].weight.register_hook(lambda gradient: gradient * model[2].bias.detach().norm())


def by_index(model: Any) -> None:
    """Fails with other values."""
    model[2].register_forward_hook(lambda *given: given[2] * torch.ones(2)[int(2 * model[1].count) - 1])


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("reads", "named"),
    [
        (by_weight, "parameter '0.weight'"),
        (by_buffer, "buffer '1.count'"),
        (by_gradient, "parameter '2.bias'"),
        (by_index, "buffer '1.count'"),
    ],
)
def test_a_layer_reads_a_tensor_of_another_one(reads: Any, named: str, exact: bool) -> None:
    model = mlp(Counts())
    check(model, exact)
    reads(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError, match=f"a layer, or a hook, reads the {named} of another layer"):
        check(model, exact)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
