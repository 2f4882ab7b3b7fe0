"""What the loop reads of the values that forward passes leave on the model is named once, and nothing else is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pickle import dumps, loads
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.data import TensorDataset

import paceline

DATA = TensorDataset(torch.randn(60, 4, generator=torch.Generator().manual_seed(1)), torch.arange(60) % 2)


class Net(nn.Module):
    """Leaves several things behind, of which some are the same in all steps."""

    shared: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.pruned = prune.identity(nn.Linear(8, 8), "weight")
        self.last: Any = None
        self.temperature = 1.0
        self.found: dict[str, Any] = {}

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(values) * self.temperature)
        self.last = self.shared = hidden.detach().mean()
        self.width, self.where, self.sizes = hidden.shape[1], hidden.device, list(hidden.shape[1:])
        self.found = {"hidden": hidden.detach()}
        self.cache = hidden.detach()
        return self.head(self.pruned(hidden))

    def first(self) -> Any:
        """Read the attribute in a forward pass."""
        return self(torch.ones(3, 4)) if self.training else self.last


def start(model: nn.Module) -> paceline.Session:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return paceline.start(model=model, optimizer=optimizer, loss=functional.cross_entropy, data=DATA, batch=24)


def trained(read: Callable[[Net, int], Any], steps: int = 4) -> list[str]:
    torch.manual_seed(0)
    model = Net()
    session = start(model)
    for batch in session.batches(steps=steps):
        report = session.step(batch)
        read(model, batch.step)
    return [note for note in report.notes if "The loop reads" in note]


def assign_first(model: Net, step: int) -> float:
    model.last = torch.zeros(())
    return float(model.last)


READ: dict[str, tuple[Callable[[Net, int], Any], str]] = {
    "a tensor": (lambda model, step: float(model.last), "model.last"),
    "by its name": (lambda model, step: getattr(model, "last"), "model.last"),  # noqa: B009
    "after each epoch": (lambda model, step: model.last if step % 3 == 2 else 0, "model.last"),
    "a dictionary": (lambda model, step: model.found["hidden"], "model.found"),
    "with a value of the class": (lambda model, step: model.shared, "model.shared"),
}


@pytest.mark.parametrize("kind", READ)
def test_a_read_is_named_once(kind: str) -> None:
    read, name = READ[kind]
    (note,) = trained(read)
    assert note.startswith(f"The loop reads {name} (test_forward_values.py:")
    assert "the result depends on the number of workers" in note and "report.metrics" in note


LEFT_ALONE: dict[str, Callable[[Net, int], Any]] = {
    "nothing": lambda model, step: None,
    "constants": lambda model, step: (model.width, model.where, model.sizes),
    "what the loop sets": lambda model, step: setattr(model, "temperature", model.temperature * 1.1),
    "what it has set anew": assign_first,
    "a forward pass by hand": lambda model, step: model.train(False)(torch.ones(2, 4)) is model.train(),
    "copies and states": lambda model, step: (copy.copy(model).last, model.state_dict(), repr(model), vars(model)),
    "a pruned weight": lambda model, step: model.pruned.weight.count_nonzero(),
    "buffers, parameters and layers": lambda model, step: (model.body.weight, model.head, [*model.buffers()]),
}


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_what_is_no_such_read(kind: str) -> None:
    assert trained(LEFT_ALONE[kind]) == []


def test_the_class_is_as_before_when_the_session_has_ended() -> None:
    trained(lambda model, step: None)
    assert "last" in vars(Net)
    missing = Net()
    del missing.last
    with pytest.raises(AttributeError, match="last"):
        _ = missing.last
    with pytest.raises(AttributeError, match="last"):
        del missing.last
    assert Net.shared is None and missing.shared is None
    start(nn.Linear(4, 2))
    assert "last" not in vars(Net) and vars(Net)["shared"] is None


def test_the_class_is_sent_to_another_process_as_it_was() -> None:
    """With an attribute that it has itself, and with one of its objects alone."""
    found: list[Any] = []

    def pickle(model: Net, step: int) -> None:
        found[:] = [vars(Net).get("last"), vars(Net)["shared"]]

    trained(pickle)
    alone, shared = (loads(dumps(one)) for one in found)
    kind = type("Kind", (), {"last": alone, "shared": shared})
    one: Any = kind()
    assert one.shared is None and not hasattr(one, "last")
    one.last = 3
    assert one.last == 3


def test_what_the_loop_has_set_stays_its_own_through_a_call() -> None:
    torch.manual_seed(0)
    model = Net()
    session = start(model)
    for batch in session.batches(steps=3):
        report = session.step(batch)
        model.last = torch.zeros(())
        session.once(int)
        assert float(model.last) == 0
    assert not [note for note in report.notes if "The loop reads" in note]


STAGES = """
from functools import partial
import torch
from torch import nn
from torch.nn import functional
import paceline
from subjects import classes, tell

class Layer(nn.Linear):
    last = None
    def forward(self, values):
        values = super().forward(values)
        self.last = values.detach().mean()
        return values

torch.manual_seed(0)
model = nn.Sequential(Layer(12, 8), nn.Tanh(), Layer(8, 8), nn.Tanh(), nn.Linear(8, 4))
session = paceline.start(model=model, optimizer=partial(torch.optim.SGD, lr=0.1), loss=functional.cross_entropy,
    data=classes(128), batch=32, strategy="pipeline", pipeline={"cut": [1]}, timeout_seconds=60)
for batch in session.batches(steps=3):
    report = session.step(batch)
    found = [model[0].last, model[2].last]
tell(notes=[note for note in report.notes if "The loop reads" in note])
"""


def test_a_stage_names_what_another_one_has(printed: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    for rank, told in enumerate(printed(STAGES, 2, tmp_path)):
        for stage, layer in enumerate((0, 2)):
            (note,) = [note for note in told["notes"] if f"reads model.{layer}.last" in note]
            assert ("has not run that forward pass" in note) == (stage != rank)
