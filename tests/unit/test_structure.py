"""Parameters that come into a model after the start are refused; whatever else happens to it is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm

from paceline.errors import InputError
from paceline.step.optimizer import OptimizerStep, Scaling


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.1))
        self.parts = nn.ModuleDict({"norm": nn.LayerNorm(4)})
        self.head = nn.Linear(4, 6, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.head(self.parts["norm"](self.body(self.embedding(tokens))))
        return value


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + weight.T


def update(model: nn.Module) -> OptimizerStep:
    return OptimizerStep(model, partial(torch.optim.SGD, lr=0.1), None, None, Scaling())


def step(model: nn.Module, made: OptimizerStep) -> None:
    made.check_structure()
    model(torch.arange(6)).sum().backward()
    made.apply(0)


def assign(model: Net) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


REFUSED: dict[str, tuple[Callable[[Net], object], str]] = {
    "a layer": (lambda model: setattr(model, "head", nn.Linear(4, 6)), "'head.weight' was replaced"),
    "a layer in a container": (lambda model: model.body.insert(1, nn.Linear(4, 4)), "'body.1.weight' was added"),
    "a parameter": (lambda model: setattr(model.head, "weight", nn.Parameter(torch.ones(6, 4))), "'head.weight' was r"),
    "a bias that was none": (
        lambda model: setattr(model.head, "bias", nn.Parameter(torch.ones(6))),
        "'head.bias' was a",
    ),
    "another module": (lambda model: model.add_module("more", nn.Linear(2, 2)), "'more.weight' was added"),
    "in a dictionary": (lambda model: model.parts.update({"x": nn.Linear(2, 2)}), "'parts.x.weight' was added"),
    "one without a shape yet": (lambda model: setattr(model, "head", nn.LazyLinear(6)), "'head.weight' was replaced"),
    "assigned by a state": (assign, "'embedding.weight' was replaced"),
    "divided by weight norm": (lambda model: parametrizations.weight_norm(model.head), "'head.parametrizations.weight"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_not_be_trained(kind: str) -> None:
    model = Net()
    made = update(model)
    step(model, made)
    change, said = REFUSED[kind]
    change(model)
    for _ in range(2):  # also if the script goes on after it
        with pytest.raises(
            InputError, match=rf"The parameter {said}.* after paceline.start, .*requires_grad_\(False\)"
        ):
            made.check_structure()


def swap(model: Net) -> None:
    model.body[0], model.body[2] = model.body[2], model.body[0]


ALLOWED: dict[str, Callable[[Net], object]] = {
    "an activation": lambda model: model.body.__setitem__(1, nn.GELU()),
    "a frozen layer": lambda model: setattr(model, "head", nn.Linear(4, 6).requires_grad_(False)),
    "a layer less": lambda model: model.body.__delitem__(0),
    "other places": swap,
    "tied weights": lambda model: setattr(model.head, "weight", model.embedding.weight),
    "pruning": lambda model: prune.l1_unstructured(model.head, "weight", 0.5),
    "a computed weight": lambda model: parametrize.register_parametrization(model.body[0], "weight", Symmetric()),
    "spectral norm": lambda model: spectral_norm(model.head),
    "a buffer": lambda model: model.register_buffer("seen", torch.zeros(3)),
    "another type": lambda model: model.double(),
}


@pytest.mark.parametrize("kind", ALLOWED)
def test_what_is_left_alone(kind: str) -> None:
    model = Net()
    made = update(model)
    step(model, made)
    ALLOWED[kind](model)
    for _ in range(2):
        step(model, made)


@pytest.mark.parametrize("at_start", ["pruning", "a computed weight", "spectral norm"])
def test_weights_computed_in_each_forward_pass(at_start: str) -> None:
    model = Net()
    ALLOWED[at_start](model)
    parametrizations.weight_norm(model.body[0]) if at_start != "a computed weight" else None
    made = update(model)
    for _ in range(3):
        step(model, made)


def test_a_frozen_one_that_is_unfrozen_later() -> None:
    model = Net()
    model.head.requires_grad_(False)
    made = update(model)
    model.add_module("more", nn.Linear(2, 2).requires_grad_(False))
    step(model, made)
    model.get_submodule("more").requires_grad_(True)
    with pytest.raises(InputError, match=r"'more.weight' was added after"):
        made.check_structure()
    model.get_submodule("more").requires_grad_(False)
    model.head.requires_grad_(True)
    with pytest.raises(InputError, match=r"'head.weight' was frozen at the start"):
        made.check_structure()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_scripted_model() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    made = update(model)
    for _ in range(2):
        made.check_structure()
        model(torch.ones(2, 4)).sum().backward()
        made.apply(0)


NAMED: dict[str, str] = {
    "a frozen layer": "The parameter 'head.bias' was added after",
    "an activation": "",
    "other places": "The parameter 'body.0.weight' became 'body.2.weight' after",
    "another type": "",
    "a layer less": "The parameter 'body.0.weight' was removed after",
    "tied weights": "The parameter 'head.weight' was removed after",
    "pruning": "The parameter 'head.weight' became 'head.weight_orig' after",
    "a computed weight": "The parameter 'body.0.weight' became 'body.0.parametrizations.weight.original' after",
    "spectral norm": "The parameter 'head.weight' became 'head.weight_orig' after",
    "a buffer": "The buffer 'seen' was added after",
    "a buffer that was none": "The buffer 'none' was added after",
    "a buffer that goes": "The buffer 'held' was removed after",
    "a frozen layer more": "The parameter 'more.weight' was added after",
}
CHANGES = ALLOWED | {
    "a buffer that was none": lambda model: setattr(model, "none", torch.ones(2)),
    "a buffer that goes": lambda model: delattr(model, "held"),
    "a frozen layer more": lambda model: model.add_module("more", nn.Linear(2, 2).requires_grad_(False)),
}


@pytest.mark.parametrize("kind", NAMED)
def test_other_names_than_at_the_start(kind: str) -> None:
    model, told = Net(), list[str]()
    model.register_buffer("none", None)
    model.register_buffer("held", torch.ones(2))
    made = update(model)
    made.on_other_names = told.append
    step(model, made)
    model.held = torch.ones(3)  # another tensor of the same name
    CHANGES[kind](model)
    said = made.other_names()
    step(model, made)
    assert said.startswith(NAMED[kind]) and bool(said) == bool(NAMED[kind]) and told == ([said] if said else [])
    assert ("prune.identity(module, 'weight')" in said) == (kind == "pruning")


def test_names_that_are_as_before_again() -> None:
    model = Net()
    made = update(model)
    model.register_buffer("seen", torch.zeros(3))
    assert "'seen' was added" in made.other_names()
    del model.seen
    assert made.other_names() == ""


def test_pruning_of_what_has_a_mask_at_the_start() -> None:
    model = Net()
    prune.identity(model.head, "weight")
    made = update(model)
    prune.l1_unstructured(model.head, "weight", 0.5)
    assert made.other_names() == ""
