"""A term of the loss that the loop switches on between two audits is audited in the first step with it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline
from paceline.data.objects.attributes import Attributes
from paceline.schedule.audits import NewValues
from paceline.step.probes.audit import Audit

Set = Callable[[bool], object]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
COUPLED: bool | None = None
WITH_GLOBALS = """
COUPLED = None
def loss(output, target):
    return spread(output, target) if [COUPLED for _ in range(1)][0] else functional.cross_entropy(output, target)
"""


def spread(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A term for how evenly the samples are spread over the classes."""
    return functional.cross_entropy(output, target) + 10 * output.softmax(1).mean(0).pow(2).sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.on, self.unread = nn.Linear(4, 2), False, 0.0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layer(values)


def by_global(model: Model) -> tuple[Loss, Set]:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return spread(output, target) if COUPLED else functional.cross_entropy(output, target)

    return loss, partial(globals().__setitem__, "COUPLED")


def by_attribute(model: Model) -> tuple[Loss, Set]:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return spread(output, target) if model.on else functional.cross_entropy(output, target)

    return loss, partial(setattr, model, "on")


def by_closure(model: Model) -> tuple[Loss, Set]:
    weight = 0.0

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return weight * spread(output, target) + (1 - weight) * functional.cross_entropy(output, target)

    def switch(on: bool) -> None:
        nonlocal weight
        weight = float(on)

    return loss, switch


def by_attribute_of_the_function(model: Model) -> tuple[Loss, Set]:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return spread(output, target) if vars(loss)["on"] else functional.cross_entropy(output, target)

    vars(loss)["on"] = False
    return loss, partial(setattr, loss, "on")


def by_arguments(model: Model) -> tuple[Loss, Set]:
    arguments = Namespace(on=False)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return spread(output, target) if arguments.on else functional.cross_entropy(output, target)

    return loss, partial(setattr, arguments, "on")


def by_module(model: Model) -> tuple[Loss, Set]:
    """The loss reads a variable of another file of the script, in a comprehension."""
    module: Any = ModuleType("losses")
    module.__file__ = str(Path(__file__).with_name("losses.py"))
    vars(module).update(spread=spread, functional=functional)
    exec(compile(WITH_GLOBALS, module.__file__, "exec"), vars(module))
    used: dict[str, Any] = {"losses": module}
    text = "def loss(output, target):\n    return losses.loss(output, target)"
    exec(compile(text, __file__, "exec"), used)
    return used["loss"], partial(setattr, module, "COUPLED")


def by_mode(model: Model) -> tuple[Loss, Set]:

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return spread(output, target) if model.layer.training else functional.cross_entropy(output, target)

    model.layer.eval()
    return loss, model.layer.train


WAYS = [by_global, by_attribute, by_closure, by_attribute_of_the_function, by_arguments, by_module, by_mode]


def start(model: Model, loss: Loss, **more: Any) -> paceline.Session:
    torch.manual_seed(0)
    values = torch.randn(512, 4)
    data = TensorDataset(values, (values.sum(1) > 0).long())
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return paceline.start(model=model, optimizer=optimizer, loss=loss, data=data, batch=32, **more)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_term_that_couples_samples_is_found_in_its_first_step(way: Callable[[Model], tuple[Loss, Set]]) -> None:
    """Steps 8 and 16 are audited by their numbers."""
    loss, switch = way(model := Model())
    session = start(model, loss)
    told: list[tuple[int, str]] = []
    for batch in session.batches(steps=16):
        switch(9 <= batch.step < 15)
        told += [(batch.step, note) for note in session.step(batch).notes if "several samples at once" in note]
    assert told and told[0][0] == 9, told
    assert told[0][1].startswith("Audit of step 9:")


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    computed: list[int] = []
    plain = Audit._compute

    def compute(audit: Audit, halves: bool = False) -> None:
        computed.append(audit._step)
        plain(audit, halves)

    monkeypatch.setattr(Audit, "_compute", compute)
    return computed


@pytest.mark.parametrize("exact", [True, False])
def test_a_value_that_changes_in_each_step_is_audited_once(audited: list[int], exact: bool) -> None:
    session = start(model := Model(), functional.cross_entropy, exact=exact)
    for batch in session.batches(steps=30):
        if batch.step > 18:
            model.unread = batch.step / 10
        session.step(batch)
    assert audited == [0, 1, 2, 4, 8, 16, 19, 29]


def test_without_audits_no_change_is_audited(audited: list[int]) -> None:
    session = start(model := Model(), functional.cross_entropy, audit="off")
    for batch in session.batches(steps=5):
        model.unread = batch.step
        session.step(batch)
    assert audited == []


def late_steps(changes: Callable[[int], dict[str, Any]], steps: int) -> list[int]:
    values, before, found = NewValues(), changes(0), []
    for step in range(1, steps):
        now = changes(step)
        values.add({name: (before.get(name), value) for name, value in now.items() if before.get(name) != value})
        before |= now
        if step & (step - 1) == 0:
            values.close(late=False)
        elif values.are_due(step):
            values.close(late=True)
            found.append(step)
    return found


def test_the_audits_of_changes_are_few() -> None:
    assert late_steps(lambda step: {"counter": step, "rate": 1 / (step + 1)}, 2000) == []
    assert late_steps(lambda step: {"phase": step // 100}, 2000) == [100, 200, 300]
    assert late_steps(lambda step: {"on": step % 50 > 40}, 2000) == [41]
    assert late_steps(lambda step: {"phase": (step > 8) + (step > 9)}, 2000) == [9, 11]
    many = late_steps(lambda step: {f"{name}": step // 100 + name for name in range(20)}, 2000)
    assert many == [100, 200, 300]
    apart = late_steps(lambda step: {f"{name}": step > 40 + 30 * name for name in range(40)}, 2000)
    assert len(apart) <= 6


def test_variables_of_several_calls_are_told_apart() -> None:
    def make(value: float) -> Callable[[], float]:
        return lambda: value

    owners = Attributes({"loss": [make(1.0), make(2.0)]}, set(), copies=False).owners
    (held,) = [owner for name, owner in owners.items() if name.endswith("make()")]
    assert sorted(held.items()) == [("value", 2.0), ("value (2)", 1.0)]
    held["value"] = 3.0
    assert sorted(held.values()) == [1.0, 3.0]
