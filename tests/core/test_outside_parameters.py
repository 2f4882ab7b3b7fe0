"""Parameters outside of the model that the loop trains with an optimizer of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline
from paceline.data.objects.attributes import Attributes
from paceline.data.objects.differing import differing_attribute
from paceline.data.objects.outside import OutsideParameters
from paceline.errors import InputError

VALUES = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
TEMP = nn.Parameter(torch.tensor(1.0))
WEIGHTS = [nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(2.0))]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output * self.scale, target)


def by_temperature(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output * TEMP, target)


def by_weights(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return sum((functional.cross_entropy(output * one, target) for one in WEIGHTS), torch.tensor(0.0))


def fixed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output * TEMP.detach(), target)


def train(loss: Any, own: torch.optim.Optimizer, body: Callable[[torch.optim.Optimizer], None], **more: Any) -> str:
    torch.manual_seed(0)
    data = TensorDataset(VALUES, (VALUES.sum(1) > 0).long())
    given = {"model": nn.Linear(4, 2), "optimizer": partial(torch.optim.SGD, lr=0.1), "data": data, "batch": 16}
    session = paceline.start(**given, loss=loss, **more)
    notes: tuple[str, ...] = ()
    for batch in session.batches(steps=3):
        notes = session.step(batch).notes
        body(own)
    return " ".join(notes)


def step(own: torch.optim.Optimizer) -> None:
    own.step()
    own.zero_grad()


def own_loss(own: torch.optim.Optimizer) -> None:
    own.zero_grad()
    (TEMP * WEIGHTS[0] - 2).square().backward()
    step(own)


def summed(own: torch.optim.Optimizer) -> None:
    """As after torch.distributed.all_reduce(TEMP.grad)."""
    assert TEMP.grad is not None
    TEMP.grad.mul_(0.001)
    step(own)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("loss", "name", "parameters"),
    [(by_temperature, "TEMP", [TEMP]), (by_weights, "WEIGHTS[0]", WEIGHTS), (Scaled(), "loss.scale", None)],
    ids=["global", "list", "module"],
)
def test_a_gradient_that_each_worker_has_for_itself_is_named(
    loss: Any, name: str, parameters: Any, exact: bool
) -> None:
    own = torch.optim.SGD(parameters or loss.parameters(), lr=1e-6)
    own.zero_grad()
    if exact:
        with pytest.raises(InputError, match="a parameter that the loss reads and the model does not have") as raised:
            train(loss, own, step, exact=True)
        text = str(raised.value)
    else:
        text = train(loss, own, step)
        assert text.count("the model does not have") == 1
    assert name in text and "Register it in the model" in text


@pytest.mark.parametrize(("loss", "body"), [(by_temperature, own_loss), (by_temperature, summed), (fixed, own_loss)])
def test_one_that_the_loop_trains_alike_on_all_workers_is_right(loss: Any, body: Any) -> None:
    own = torch.optim.SGD([TEMP], lr=1e-3)
    own.zero_grad()
    assert "does not have" not in train(loss, own, body, exact=True)


def test_an_audit_that_finds_it_says_so() -> None:
    """As where the loop makes the update itself: TEMP -= 0.1 * TEMP.grad."""
    outside = OutsideParameters(Attributes({"loss": by_temperature}, set(), copies=False))
    (name,) = outside.parameters
    owner, _, key = name.rpartition(".")
    outside.end()
    text = differing_attribute([{owner: {key: torch.tensor(1.0)}}, {owner: {key: torch.tensor(2.0)}}], outside)
    assert "TEMP is a parameter that the loss reads" in text and "self.TEMP = torch.nn.Parameter" in text
