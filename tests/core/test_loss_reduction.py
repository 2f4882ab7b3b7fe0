"""A loss that is no mean over the samples is found in the first step; right ones and the model are left alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from subjects import classes, mlp
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

import paceline
from paceline.errors import InputError

Loss = Callable[[torch.Tensor, torch.Tensor], Any]
SUMMED = partial(cross_entropy, reduction="sum")


class Noisy(nn.Module):
    """Batch statistics, dropout of both kinds and random numbers, as of a variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layers(functional.dropout(values, 0.1) + 0.1 * torch.randn_like(values))


class InPlace(nn.Module):
    """It changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layer(values.mul_(2))


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


def contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    keys = functional.normalize(output, dim=1)
    return cross_entropy(keys @ keys.t() / 0.5, torch.arange(len(keys)))


def weighted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.tensor([0.3, 0.5, 1.7, 0.2])[target]
    return (cross_entropy(output, target, reduction="none") * weights).sum(), weights.sum()


def by_class(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    losses, found = cross_entropy(output, target, reduction="none"), target.unique()
    return torch.stack([losses[target == one].mean() for one in found]).sum(), len(found)


RIGHT: dict[str, Loss] = {
    "mean": cross_entropy,
    "counted": lambda output, target: (SUMMED(output, target), len(target)),
    "some": lambda output, target: (SUMMED(output[target < 2], target[target < 2]), (target < 2).sum()),
    "weighted": weighted,
    "drawn": lambda output, target: ((output * (weights := torch.rand(len(output), 1))).sum(), weights.sum()),
    "contrastive": contrastive,
    "of microbatches": lambda output, target: (contrastive(output, target), 1),
    "classes": by_class,
    "metrics": lambda output, target: (cross_entropy(output, target), {"accuracy": accuracy(output, target)}),
    "zero": lambda output, target: 0.0 * output.sum(),
    "spread": lambda output, target: output.var(0).sum() + output.mean().exp(),
}
WRONG: dict[str, tuple[Loss, str]] = {
    "sum": (SUMMED, "reduction='sum'"),
    "sum and metrics": (lambda output, target: (SUMMED(output, target), {"one": 1.0}), "reduction='sum'"),
    "accuracy": (lambda output, target: (cross_entropy(output, target), accuracy(output, target)), "is not a count"),
    "sum, accuracy": (lambda output, target: (SUMMED(output, target), accuracy(output, target)), "is not a count"),
    "mean and count": (lambda output, target: (cross_entropy(output, target), len(target)), "must be a sum"),
}


def train(loss: Loss, model: nn.Module | None = None, **more: Any) -> tuple[tuple[str, ...], str]:
    torch.manual_seed(0)
    given: dict[str, Any] = {"batch": 32, "microbatches": 4} | more
    session = paceline.start(
        model=model or mlp(), optimizer=partial(torch.optim.SGD, lr=0.01), loss=loss, data=classes(64), **given
    )
    for batch in session.batches(steps=1):
        report = session.step(batch)
    return report.notes, session.fingerprint()


def alarms(notes: tuple[str, ...]) -> list[str]:
    return [note for note in notes if "not certain" in note]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loss_is_left_alone(name: str) -> None:
    for model in (None, Noisy()):
        assert not alarms(train(RIGHT[name], model)[0])


@pytest.mark.promise("docs/losses.md", 'It refuses a scalar that grows with the samples (`reduction="sum"`)')
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loss_is_refused_with_what_it_seems_to_be(name: str) -> None:
    loss, text = WRONG[name]
    with pytest.raises(InputError, match=text):
        train(loss)


@pytest.mark.parametrize("name", ["sum", "accuracy", "mean and count"])
def test_among_random_numbers_too(name: str) -> None:
    loss, text = WRONG[name]
    with pytest.raises(InputError, match=text):
        train(loss, Noisy())


class NoisyByPython(nn.Module):
    """Its random numbers are not those of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layer(values * (1 + 0.2 * torch.tensor([[random.random()] for _ in values])))


@pytest.mark.parametrize("name", ["sum", "mean and count"])
def test_among_random_numbers_of_others_there_is_a_warning(name: str) -> None:
    loss, text = WRONG[name]
    (found,) = alarms(train(loss, NoisyByPython())[0])
    assert text in found


@pytest.mark.parametrize("name", ["mean", "contrastive", "weighted"])
def test_of_small_microbatches_too(name: str) -> None:
    assert not alarms(train(RIGHT[name], batch=4, microbatches=2)[0])


def test_a_sum_over_the_whole_batch_is_what_it_is_in_plain_training() -> None:
    assert not alarms(train(SUMMED, batch=8, microbatches=1)[0])


def test_the_trial_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, loss, exact in (
        (Noisy, cross_entropy, False),
        (Noisy, cross_entropy, True),
        (InPlace, RIGHT["of microbatches"], True),
    ):
        torch.manual_seed(0)
        tried = train(loss, kind(), exact=exact)[1]
        monkeypatch.setattr("paceline.step.probes.first_step.check_loss_reduction", lambda *_: None)
        torch.manual_seed(0)
        assert train(loss, kind(), exact=exact)[1] == tried
        monkeypatch.undo()


class InPairs(nn.Module):
    """For eight samples alone, of which batch statistics are taken before it finds out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(12), nn.Linear(12, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1.0)
        return self.layer(self.norm(values).view(2, 4, -1).flatten(0, 1))


class Penalized(nn.Module):
    """With a backward pass inside the forward pass, as for a gradient penalty or an adversarial sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(12), nn.Linear(12, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = values.detach().requires_grad_()
        self.layer(self.norm(values)).square().sum().backward(inputs=[values])
        assert values.grad is not None
        return self.layer(self.norm(values.detach() + 0.1 * values.grad.sign()))


@pytest.mark.parametrize("exact", [False, True])
def test_a_trial_that_raises_leaves_no_trace(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = InPairs()
    notes, tried = train(cross_entropy, model, exact=exact)
    assert (model.norm.num_batches_tracked.item(), model.seen.item()) == (1, 1.0)
    (said,) = [note for note in notes if "The loss could not be checked" in note]
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied" in said
    monkeypatch.setattr("paceline.step.probes.first_step.check_loss_reduction", lambda *_: None)
    torch.manual_seed(0)
    assert train(cross_entropy, InPairs(), exact=exact)[1] == tried


def test_a_backward_pass_in_the_forward_pass_can_be_tried() -> None:
    model = Penalized()
    notes, _ = train(cross_entropy, model)
    assert not [note for note in notes if "could not be checked" in note] and not alarms(notes)
    assert model.norm.num_batches_tracked.item() == 2  # of one step: in the forward pass it is called twice
    with pytest.raises(InputError, match="grows with the number of samples"):
        train(SUMMED, Penalized())


class ForFour(nn.Module):
    """A model for four samples alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layer(values.view(4, 12))


def test_a_model_for_one_number_of_samples_is_computed_microbatch_by_microbatch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    session = paceline.start(
        model=ForFour(),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        loss=cross_entropy,
        data=classes(64),
        batch=32,
    )
    assert session._context.order.microbatches == 8
    with caplog.at_level("INFO", logger="paceline"):
        reports = [session.step(batch) for batch in session.batches(steps=3)]
    assert ["could not be checked" in note for note in reports[-1].notes].count(True) == 1
    assert (
        "microbatches are computed one by one: the forward pass of several at once raises RuntimeError" in caplog.text
    )


def test_a_compiled_model_is_compiled_after_the_trial() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model = InPlace()
    model.compile(backend=backend)
    train(cross_entropy, model)
    assert graphs


def test_a_pipeline_finds_it_too(printed: Callable[..., list[dict[str, Any]]], tmp_path: Any) -> None:
    script = """
from functools import partial
import torch, paceline
from subjects import classes, mlp, tell
try:
    session = paceline.start(
        model=mlp(), optimizer=partial(torch.optim.SGD, lr=0.1), data=classes(32), batch=16, strategy="pipeline",
        loss=partial(torch.nn.functional.cross_entropy, reduction="sum"),
    )
    for batch in session.batches(steps=1):
        session.step(batch)
except paceline.PacelineError as error:
    tell(refused=str(error))
"""
    assert all("reduction='sum'" in one["refused"] for one in printed(script, 2, tmp_path))
