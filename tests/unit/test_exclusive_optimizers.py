"""The optimizers of a session are stepped by the session alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from paceline.errors import InputError
from paceline.step.optimizer import OptimizerStep, Scaling
from paceline.step.optimizers.exclusive import guard_parts


class Ascending(Optimizer):
    """Takes two steps, the second one by the optimizer that it wraps, as SAM does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.base = SGD(self.param_groups, lr=0.1)

    def second_step(self) -> None:
        self.base.step()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self.second_step()


class Slow(Optimizer):
    """Wraps another one without the constructor of its base class, as published versions of Lookahead."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        self.param_groups = base.param_groups
        self.state = base.state

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self.base.step()


def update(factory: Any, schedule: Any = None) -> OptimizerStep:
    made = OptimizerStep(nn.Linear(3, 2), factory, schedule, None, Scaling())
    for value in made.parameters.values():
        value.grad = torch.ones_like(value)
    return made


def pair(named_parameters: Any) -> list[Optimizer]:
    return [SGD([one], lr=0.1) for one in named_parameters]


FACTORIES = {
    "Adam": partial(Adam, lr=0.1),
    "of two": pair,
    "with two passes": Ascending,
    "a wrapper": lambda parameters: Slow(SGD(parameters, lr=0.1)),
}


@pytest.mark.parametrize("kind", FACTORIES)
def test_only_the_session_steps(kind: str) -> None:
    made = update(FACTORIES[kind], None if kind == "a wrapper" else partial(StepLR, step_size=2))
    before = [value.detach().clone() for value in made.parameters.values()]
    with pytest.raises(InputError, match=r"The script calls step\(\) of the optimizer .*Remove optimizer.step\(\)"):
        made.optimizer.step()
    assert all(map(torch.equal, before, made.parameters.values()))
    made.apply(0)
    assert not any(map(torch.equal, before, made.parameters.values()))
    with pytest.raises(InputError, match="twice"):
        made.optimizer.step()


def test_a_part_and_a_second_pass_are_refused() -> None:
    several = update(pair)
    with pytest.raises(InputError, match="SGD"):
        several.optimizer.optimizers["1"].step()  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="SGD"):
        update(Ascending).optimizer.second_step()  # type: ignore[attr-defined]
    several.of("1").apply(0)


def test_a_closure_of_the_script_is_not_called() -> None:
    made = update(LBFGS)
    with pytest.raises(InputError, match="LBFGS"):
        made.optimizer.step(lambda: pytest.fail("it was called"))


def test_an_update_that_fails_leaves_it_refused() -> None:
    made = update(partial(SGD, lr=0.1))
    made.parameters["weight"].grad = torch.ones(2, 3).to_sparse()
    made.parameters["bias"].grad = None

    def fail(optimizer: Optimizer) -> None:
        raise RuntimeError("no")

    made.take = fail
    with pytest.raises(InputError, match="sparse"):
        made.apply(0)
    with pytest.raises(InputError, match="twice"):
        made.optimizer.step()


def test_a_copy_of_the_session_updates_and_refuses_too() -> None:
    made = update(partial(Adam, lr=0.1), partial(StepLR, step_size=2))
    other = made.copied(made.parameters)
    for value in other.parameters.values():
        value.grad = torch.ones_like(value)
    other.apply(0)
    with pytest.raises(InputError, match="Adam"):
        other.optimizer.step()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["deep", "pickle"])
def test_a_copy_of_the_script_is_its_own(copied: Callable[[Optimizer], Optimizer]) -> None:
    made = update(partial(Adam, lr=0.1))
    own = copied(made.optimizer)
    (group,) = own.param_groups
    for value in group["params"]:
        value.grad = torch.ones_like(value)
    own.step()
    assert set(made.optimizer.state_dict()) == {"state", "param_groups"}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["deep", "pickle"])
def test_a_copy_of_an_optimizer_with_a_part_is_the_scripts(copied: Callable[[Optimizer], Optimizer]) -> None:
    value = nn.Parameter(torch.ones(2))
    optimizer = Adam([value])
    end = guard_parts(optimizer)
    with pytest.raises(InputError, match="a part of the optimizer's state"):
        optimizer.state[value]
    own = copied(optimizer)
    (mine,) = own.param_groups[0]["params"]
    mine.grad = torch.ones(2)
    own.step()
    assert own.state_dict()["state"][0]["step"] == 1 and not optimizer.state
    end()
    assert optimizer.state[value] == {}


def test_a_state_without_default_stays_as_it_is() -> None:
    value = nn.Parameter(torch.ones(2))
    optimizer = SGD([value])
    optimizer.state = {}  # type: ignore[assignment]
    end = guard_parts(optimizer)
    with pytest.raises(InputError, match="a part of the optimizer's state"):
        optimizer.state_dict()
    with pytest.raises(KeyError):
        optimizer.state[value]
    end()
    assert optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("factory", [pair, partial(SGD, lr=0.1)], ids=["two", "one"])
def test_gradients_may_be_dropped(factory: Any) -> None:
    made = update(factory)
    made.optimizer.zero_grad()
    assert all(value.grad is None for value in made.parameters.values())


def test_an_optimizer_may_be_given_to_a_second_session() -> None:
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        made = OptimizerStep(model, lambda model: optimizer, None, None, Scaling())
        for value in made.parameters.values():
            value.grad = torch.ones_like(value)
        made.apply(0)
