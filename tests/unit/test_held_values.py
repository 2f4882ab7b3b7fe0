"""What workers hold beside the compared tensors is named when their tensors or hyper-parameters differ."""

from __future__ import annotations

import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import paceline
from paceline.errors import DisagreementError
from paceline.step import replicas

CAUGHT: dict[str, Any] = {}
QUEUE: list[Any] = []


class World:
    """Two workers: what rank 0 sends, and what it sent when it had computed another microbatch."""

    size = 2

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.others: list[Any] = []

    def gather(self, value: Any, what: str) -> list[Any]:
        self.sent.append(value)
        return [value, self.others[len(self.sent) - 1] if self.others else value]


def test_what_a_hook_has_caught_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].register_forward_hook(lambda module, inputs, output: CAUGHT.update(h=output.detach().mean()))
    model[0].register_forward_hook(lambda module, inputs, output: QUEUE.append(output.detach().mean()))
    session = paceline.start(
        model=model,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=functional.cross_entropy,
        data=[(torch.ones(4), 0)] * 16,
        batch=8,
        exact=True,
    )
    real = session._context
    context: Any = SimpleNamespace(
        **{key: getattr(real, key) for key in ("compute", "update", "settings", "events", "audits")},
        divides_update=False,
        divides_state=False,
        world=World(),
    )
    model(torch.ones(2, 4))
    assert replicas.compare(context, "step")
    first = World()
    context.world = first
    context.update.optimizer.param_groups[0]["lr"] = 0.2
    first.others = [(dict.fromkeys(["x"], 1), 0, {"lr of group 0": "0.1"}), replicas._held(context)]
    with pytest.raises(DisagreementError, match="lr of group 0") as told:
        replicas.compare(context, "step")
    assert "On each worker" not in str(told.value) and "joined" not in str(told.value)
    context.world = World()
    context.world.others = first.others
    context.audits.look_at(7, [1])
    with pytest.raises(DisagreementError, match="Rank 1 joined at step 7, without running the loop body of earlier"):
        replicas.compare(context, "step")
    context.world = World()
    context.world.others = first.others
    QUEUE.clear()
    model(torch.zeros(2, 4))
    with pytest.raises(DisagreementError, match=r"On each worker CAUGHT\['h'\] and QUEUE have another value"):
        replicas.compare(context, "step")


def test_an_object_in_an_option_is_described_by_its_class() -> None:
    """Its repr has an address, which differs on equal workers."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.param_groups[0]["rules"] = (object(), [0.5])
    assert replicas.options_of(optimizer)["rules of group 0"] == "(object, (0.5))"


def test_all_digits_of_a_tensor_in_an_option_are_compared() -> None:
    parameters = [torch.nn.Parameter(torch.ones(1))]
    rates = [torch.optim.Adam(parameters, lr=torch.tensor(rate)) for rate in (1e-3, 1.00001e-3)]
    first, second = (replicas.options_of(one)["lr of group 0"] for one in rates)
    assert float(first) == pytest.approx(1e-3) and first != second


def test_an_audit_keeps_no_gradient_of_the_last_step() -> None:
    model, last = nn.Linear(4, 2), list[weakref.ref[torch.Tensor]]()

    def forward(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        assert not last or last[-1]() is None
        return model(rows).square().mean()

    session = paceline.start(
        model=model, optimizer=partial(torch.optim.SGD, lr=0.1), forward=forward, data=torch.ones(64, 4), batch=8
    )
    for batch in session.batches(steps=5):
        session.step(batch)
        assert model.weight.grad is not None
        last.append(weakref.ref(model.weight.grad))
