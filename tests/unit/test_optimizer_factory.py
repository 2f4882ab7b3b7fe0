"""What the factory of optimizers gets, and what it may return."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Muon
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR, StepLR

from paceline.errors import InputError
from paceline.step.optimizer import OptimizerStep, Scaling
from paceline.step.optimizers.overlap import check_apart
from paceline.step.optimizers.several import SeveralOptimizers, SeveralSchedules


def model() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    made[0].bias.requires_grad_(False)
    return made


def update(optimizer: Any, schedule: Any = None, of: nn.Module | None = None) -> OptimizerStep:
    return OptimizerStep(of or model(), optimizer, schedule, None, Scaling())


def test_the_first_parameter_says_what_the_factory_gets() -> None:
    got: list[Any] = []

    def by_model(model: nn.Module, lr: float = 0.5) -> SGD:
        got.append(model)
        return SGD(model.parameters(), lr)

    def by_name(named_parameters: Any) -> SGD:
        got.append(named_parameters)
        return SGD(named_parameters, lr=0.1)

    def by_value(values: Any) -> SGD:
        got.append(values)
        return SGD(values, lr=0.1)

    one = model()
    trained = {name: value for name, value in one.named_parameters() if value.requires_grad}
    frozen = one[0].bias
    frozen.requires_grad_(True)
    update(partial(by_model, lr=0.1), of=one)
    frozen.requires_grad_(False)
    names = update(by_name, of=one).optimizer.param_groups[0]["param_names"]
    update(by_value, of=one)
    update(AdamW, of=one)
    assert got[0] is one
    assert got[1] == list(trained.items()) and names == list(trained)
    assert [id(value) for value in got[2]] == [id(value) for value in trained.values()]


def two(named_parameters: Any) -> dict[str, Any]:
    matrices = [pair for pair in named_parameters if pair[1].ndim == 2]
    return {"muon": Muon(matrices, lr=0.02), "rest": AdamW([pair for pair in named_parameters if pair[1].ndim != 2])}


def test_several_are_seen_as_one() -> None:
    made = update(two)
    optimizer = made.optimizer
    assert isinstance(optimizer, SeveralOptimizers) and made.kind == "muon: Muon, rest: AdamW"
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 1e-3]
    before = {name: value.detach().clone() for name, value in made.parameters.items()}
    for value in made.parameters.values():
        value.grad = torch.ones_like(value)
    made.apply(0)
    assert all(not torch.equal(value, before[name]) for name, value in made.parameters.items())
    assert set(optimizer.state) == set(made.parameters.values())
    assert all(one.state is optimizer.state for one in optimizer.optimizers.values())


def test_a_state_that_one_has_from_the_start_is_kept() -> None:
    adagrad = partial(Adagrad, initial_accumulator_value=2.0)
    made = update(lambda model: [adagrad([value]) for value in model.parameters() if value.requires_grad])
    assert [made.optimizer.state[value]["sum"].mean() for value in made.parameters.values()] == [2, 2, 2]


def test_each_has_a_schedule() -> None:
    halving = partial(StepLR, step_size=1, gamma=0.5)
    for schedule, rates in (
        (halving, [0.01, 5e-4]),
        ({"muon": halving}, [0.01, 1e-3]),
        ({"muon": None, "rest": halving}, [0.02, 5e-4]),
        ({"muon": None}, [0.02, 1e-3]),
    ):
        made = update(two, schedule)
        for value in made.parameters.values():
            value.grad = torch.ones_like(value)
        made.apply(0)
        assert [group["lr"] for group in made.optimizer.param_groups] == rates
    made = update(two, halving)
    assert isinstance(made.schedule, SeveralSchedules)
    for value in made.parameters.values():
        value.grad = torch.ones_like(value)
    made.apply(0)
    again = update(two, halving)
    assert again.schedule is not None
    again.schedule.load_state_dict(made.schedule.state_dict())
    assert again.schedule.state_dict() == made.schedule.state_dict()


def _late(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [StepLR(optimizer, 1), StepLR(optimizer, 2)], [3])


@pytest.mark.parametrize("schedule", [None, partial(StepLR, step_size=1), {"rest": _late}], ids=["none", "all", "one"])
def test_a_copy_shares_nothing(schedule: Any) -> None:
    """As held by a server on another machine."""
    original = update(two, schedule)
    copy = original.copied({"0.weight", "1.bias"})
    for value in copy.parameters.values():
        value.grad = torch.ones_like(value) if value.numel() else None
    copy.apply(0)
    assert not original.optimizer.state
    assert set(copy.optimizer.state) == {copy.parameters["0.weight"], copy.parameters["1.bias"]}
    rates = [[group["lr"] for group in one.optimizer.param_groups] for one in (original, copy)]
    assert rates[0] == [0.02, 1e-3] and (schedule is None or rates[1] != rates[0])


class Wrapping(torch.optim.Optimizer):
    """Keeps another optimizer, as SAM and Lookahead do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.base = AdamW(self.param_groups)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.base.step()


def test_the_state_of_an_optimizer_in_another_one_is_seen() -> None:
    made = update(Wrapping)
    for value in made.parameters.values():
        value.grad = torch.ones_like(value)
    made.apply(0)
    assert all("exp_avg" in made.optimizer.state[value] for value in made.parameters.values())


def _twice(model: nn.Module) -> dict[str, Any]:
    return {"one": SGD(model[1].parameters(), lr=0.1), "other": SGD([model[1].weight], lr=0.1)}  # type: ignore[index]


@pytest.mark.parametrize(
    ("optimizer", "schedule", "words"),
    [
        (_twice, None, ["'1.weight'", "two optimizers, 'one' and 'other'"]),
        (lambda model: {"one": SGD(model[1].parameters(), lr=0.1), "none": None}, None, ["'none'", "NoneType"]),
        (lambda model: {}, None, ["no optimizer"]),
        (lambda model: list(model.parameters()), None, ["a list"]),
        (lambda model: model.lr, None, ["'lr'"]),
        (lambda model, lr: None, None, ["called with the model", "'lr'"]),
        (lambda model: [SGD(nn.Linear(2, 2).parameters(), lr=0.1)], None, ["shape [2, 2]", "not one of the model's"]),
        (two, {"adam": StepLR}, ["'adam'", "'muon', 'rest'"]),
        (two, {"rest": ReduceLROnPlateau}, ["ReduceLROnPlateau", "'metrics'"]),
        (partial(SGD, lr=0.1), {"one": StepLR}, ["by name", "one optimizer"]),
    ],
)
def test_what_cannot_be_used(optimizer: Any, schedule: Any, words: list[str]) -> None:
    with pytest.raises((InputError, AttributeError)) as said:
        update(optimizer, schedule)
    assert all(word in str(said.value) for word in words), said.value


def test_parameters_without_an_optimizer() -> None:
    assert update(lambda model: SGD([model[1].bias], lr=0.1)).without_optimizer == ["0.weight", "1.weight"]
    assert update(two).without_optimizer == []


@pytest.mark.parametrize(
    ("view", "shared"), [(torch.t, True), (lambda value: value[:, ::2], False)], ids=["all", "gaps"]
)
def test_other_strides_over_the_same_memory_are_seen(
    view: Callable[[torch.Tensor], torch.Tensor], shared: bool
) -> None:
    memory = torch.zeros(4, 6)
    parameters = {"first": nn.Parameter(memory), "second": nn.Parameter(view(memory))}
    with pytest.raises(InputError, match="memory in common") if shared else nullcontext():
        check_apart(parameters, "sharded")
