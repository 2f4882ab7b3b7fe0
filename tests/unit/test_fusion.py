"""Which microbatches are computed in one pass: not those whose gradients are clipped or normalized in each pass."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline
from paceline.step.forward import ForwardRunner


class Normalized(torch.autograd.Function):
    """The identity, with a gradient of norm 1."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] / gradients[0].norm()


class Net(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.body, self.head, self.between = nn.Linear(4, 8), nn.Linear(8, 2), between

    def forward(self, values: torch.Tensor) -> Any:
        return self.head(self.between(torch.tanh(self.body(values))))


def start(model: nn.Module, **more: Any) -> paceline.Session:
    torch.manual_seed(0)
    values = torch.randn(48, 4)
    return paceline.start(
        model=model,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=functional.cross_entropy,
        data=TensorDataset(values, (values.sum(1) > 0).long()),
        batch=16,
        **more,
    )


def clip(model: Net) -> None:
    model.body.weight.register_hook(lambda gradient: gradient.clamp(-1e3, 1e3))  # which this gradient is far from


def clip_accumulated(model: Net) -> None:
    model.body.weight.register_post_accumulate_grad_hook(
        lambda weight: torch.nn.utils.clip_grad_norm_([weight], 0.01) and None
    )


def center(model: Net) -> None:
    def hook(module: nn.Module, gradients: Any) -> Any:
        return (gradients[0] - gradients[0].mean(0),)

    model.head.register_full_backward_pre_hook(hook)


def nothing(model: Net) -> None:
    model.head.bias.register_hook(lambda gradient: gradient * 2)


@pytest.mark.parametrize(
    ("between", "change", "fused"),
    [
        (torch.relu, nothing, True),
        (torch.relu, clip, False),
        (torch.relu, clip_accumulated, False),
        (torch.relu, center, False),
        (Normalized.apply, nothing, False),
    ],
)
def test_gradients_of_a_pass_decide(
    between: Any,
    change: Callable[[Net], None],
    fused: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Net(between)
    change(model)
    session = start(model)
    told = list[bool]()

    def mark(event: str, **values: Any) -> None:
        told.extend([values["fused"]] if "fused" in values else [])

    monkeypatch.setattr(session._context.events, "mark", mark)
    with caplog.at_level(logging.INFO, "paceline"):
        for batch in session.batches(steps=2):
            session.step(batch)
    found = "in one pass is not the sum of those of the microbatches" in caplog.text
    assert found is not fused, caplog.text
    assert ("each worker computes its microbatches in one pass" in caplog.text) is fused
    assert told == [fused]


class Switched(nn.Module):
    """Draws random numbers, couples samples, or takes no half a microbatch, once it is switched on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind, self.on = nn.Linear(4, 2), kind, False

    def forward(self, values: torch.Tensor) -> Any:
        if self.on and self.kind == "draws":
            values = functional.dropout(values)
        if self.on and self.kind == "takes no half" and len(values) % 2:
            raise ValueError("an odd number of samples")
        output = self.layer(values)
        if self.on and self.kind == "normalizes":
            return Normalized.apply(output)
        return output - output.mean(0) if self.on and self.kind == "centers" else output


def trained(kind: str, **more: Any) -> tuple[torch.Tensor, list[str]]:
    torch.manual_seed(0)
    model = Switched(kind)
    session = start(model, **more)
    for batch in session.batches(steps=12):
        model.on = batch.step >= 3
        report = session.step(batch)
    return model.layer.weight.detach(), list(report.notes[1:])


def test_random_numbers_that_are_drawn_later_belong_to_microbatches() -> None:
    (fused, notes), (single, _) = trained("draws"), trained("draws", microbatches=8)
    torch.testing.assert_close(fused, single, rtol=1e-5, atol=1e-6)
    assert not notes


@pytest.mark.parametrize(
    ("kind", "difference"),
    [
        ("centers", r"that of a microbatch is \d.*, and of its halves \d.* on average"),
        ("normalizes", r"the gradient of 'layer\.(weight|bias)' of a microbatch is not the sum of those of its halves"),
    ],
)
def test_a_loss_that_couples_samples_later_is_named_once(kind: str, difference: str) -> None:
    _, (note,) = trained(kind)
    assert re.match(f"Audit of step 3: the loss looks at several samples at once, .*: {difference}", note), note


def test_microbatches_are_computed_one_by_one_after_a_loss_couples_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, plain = list[int](), ForwardRunner.take

    def take(compute: ForwardRunner, value: Any, samples: int) -> Any:
        counts.append(samples)
        return plain(compute, value, samples)

    monkeypatch.setattr(ForwardRunner, "take", take)
    trained("centers")
    assert 16 in counts  # all samples of step 3 at once
    assert counts[-16:] == [2] * 16  # the last two steps


def test_microbatches_are_computed_one_by_one_in_steps_in_which_workers_send_samples() -> None:
    session = start(Switched("nothing"))
    session._context.order.sends = lambda step: step in (0, 6, 7)  # type: ignore[method-assign]
    counts = list[int]()
    for batch in session.batches(steps=10):
        counts.append(len(batch.groups))
        session.step(batch)
    assert counts[0] == counts[1] == 8, "the second step decides"
    assert counts[3:] == [1] * 3 + [8] * 2 + [1] * 2


@pytest.mark.parametrize("kind", ["nothing", "takes no half"])
def test_a_loss_of_single_samples_is_not_named(kind: str) -> None:
    assert not trained(kind, audit=1)[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_nor_is_one_whose_values_are_rounded(dtype: str) -> None:
    assert not trained("nothing", audit=1, autocast=dtype)[1]


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_what_a_hook_keeps_is_as_without_the_passes_that_decide(register: str) -> None:
    model, norms = Net(nn.Identity()), list[float]()

    def keep(value: torch.Tensor) -> None:
        norms.append(float(value.norm()))

    getattr(model.body.weight, register)(keep)
    session = start(model)
    session.step(next(iter(session.batches())))
    assert len(norms) == 8
