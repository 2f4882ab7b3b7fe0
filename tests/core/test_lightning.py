"""A LightningModule trains as it stands: Lightning's own where it is installed, and one with the same methods."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import paceline
from paceline.adapters import lightning
from paceline.errors import InputError

needs_lightning = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
STEPS_PER_EPOCH = 3


class StandIn(nn.Module):
    """What is used of a LightningModule."""

    automatic_optimization = True


def base(name: str) -> Any:
    if name == "stand-in":
        return StandIn
    from lightning import LightningModule

    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)  # it is set by the import
    return LightningModule


BASES = ["stand-in", pytest.param("lightning", marks=needs_lightning)]


def classifier(kind: Any, configured: Any) -> Any:
    class Classifier(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.net(inputs)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            inputs, targets = batch
            loss = cross_entropy(self(inputs), targets)
            self.log("train_loss", loss, prog_bar=True, on_step=True)
            self.log_dict({"half": loss / 2}, batch_size=len(targets))
            return {"loss": loss}

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            inputs, targets = batch
            hits = (self(inputs).argmax(dim=1) == targets).float().mean()
            self.log("val_accuracy", hits)

        def configure_optimizers(self) -> Any:
            return configured(self)

    return Classifier()


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.05)


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(30, 6, generator=generator)
    return torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


def scheduled(module: nn.Module, form: str) -> Any:
    optimizer = adam(module)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return {
        "pair of lists": ([optimizer], [scheduler]),
        "dictionary": {"optimizer": optimizer, "lr_scheduler": scheduler},
        "by step": {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}},
        "every 2 steps": [
            {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 2}}
        ],
        "alone": optimizer,
    }[form]


RATES = {
    "pair of lists": [0.05] * 3 + [0.025] * 3,
    "dictionary": [0.05] * 3 + [0.025] * 3,
    "by step": [0.05 / 2**step for step in range(6)],
    "every 2 steps": [0.05, 0.05, 0.025, 0.025, 0.0125, 0.0125],
    "alone": [0.05] * 6,
}


@pytest.mark.parametrize("name", BASES)
def test_it_trains_like_the_same_in_paceline_alone(name: str) -> None:
    module = classifier(base(name), adam)
    session = paceline.start(**lightning.arguments(module), data=data(), batch=10, exact=True)
    reports = [session.step(batch) for batch in session.batches(epochs=2)]
    plain = classifier(nn.Module, adam)
    alone = paceline.start(model=plain.net, optimizer=plain_adam, loss=cross_entropy, data=data(), batch=10, exact=True)
    wanted = [alone.step(batch) for batch in alone.batches(epochs=2)]
    assert [one.loss for one in reports] == [one.loss for one in wanted]
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
    for one in reports:
        assert one.metrics["train_loss"] == pytest.approx(one.loss) and one.metrics["half"] == pytest.approx(
            one.loss / 2
        )


def plain_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


@pytest.mark.parametrize("name", BASES)
def test_validation(name: str) -> None:
    module = classifier(base(name), adam)
    session = paceline.start(**lightning.arguments(module), data=data(), batch=10)
    inputs, targets = data().tensors
    wanted = (module(inputs).argmax(dim=1) == targets).float().mean().item()
    assert session.evaluate(data(), lightning.validation("val_accuracy")) == pytest.approx(wanted)
    with pytest.raises(InputError, match="validation_step did not log 'val_loss': it logged 'val_accuracy'"):
        session.evaluate(data(), lightning.validation("val_loss"))
    assert "log" not in vars(module)


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("form", RATES)
def test_each_form_of_optimizers_and_schedulers(name: str, form: str) -> None:
    module = classifier(base(name), lambda module: scheduled(module, form))
    given = lightning.arguments(module, steps_per_epoch=STEPS_PER_EPOCH)
    session = paceline.start(**given, data=data(), batch=10)
    rates = [session.step(batch).learning_rate for batch in session.batches(epochs=2)]
    assert rates == pytest.approx(RATES[form])


def plateau(module: nn.Module) -> Any:
    optimizer = adam(module)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)}


@pytest.mark.parametrize(
    ("configured", "said"),
    [
        (lambda module: [adam(module), adam(module)], r"returns several optimizers \(Adam, Adam\)"),
        (plateau, "ReduceLROnPlateau cannot be the scheduler"),
        (lambda module: None, "must return an optimizer, but it is a NoneType"),
        (lambda module: scheduled(module, "dictionary"), r"StepLR advances once per epoch: give arguments\("),
    ],
    ids=["several", "plateau", "none", "epoch"],
)
def test_optimizers_that_are_refused(configured: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        lightning.arguments(classifier(StandIn, configured))


@needs_lightning
def test_a_trainer_that_is_asked() -> None:
    module = classifier(base("lightning"), lambda module: module.trainer.estimated_stepping_batches)
    with pytest.raises(InputError, match="configure_optimizers of Classifier needs its Trainer, and there is none"):
        lightning.arguments(module)


@pytest.mark.parametrize("name", BASES)
def test_hooks(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Those that change a step are refused, others are named; Lightning's own are neither."""
    module = classifier(base(name), adam)
    with caplog.at_level(logging.WARNING, "paceline"):
        lightning.arguments(module)
        assert not caplog.records
        type(module).on_train_epoch_end = lambda self: None
        lightning.arguments(module)
    assert "Classifier overrides on_train_epoch_end, which are not called" in caplog.text
    type(module).optimizer_step = lambda self, *_: None
    with pytest.raises(InputError, match="Classifier overrides optimizer_step, which would not be called"):
        lightning.arguments(module)


def test_manual_optimization_and_no_module() -> None:
    module = classifier(StandIn, adam)
    type(module).automatic_optimization = False
    with pytest.raises(InputError, match="Classifier optimizes manually"):
        lightning.arguments(module)
    with pytest.raises(InputError, match="Linear has no method training_step"):
        lightning.arguments(nn.Linear(1, 1))


def test_a_step_without_a_loss() -> None:
    module = classifier(StandIn, adam)
    module.training_step = lambda batch, index: None
    session = paceline.start(**lightning.arguments(module), data=data(), batch=10)
    with pytest.raises(InputError, match="training_step returned no loss"):
        session.step(next(iter(session.batches(steps=1))))
