"""A loss that looks at several samples at once is named, and buffers that count samples are added up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline

Printed = Callable[..., list[dict[str, Any]]]
WARNS = "looks at several samples at once"


def contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Each sample among all others, as in SimCLR."""
    return functional.cross_entropy(output @ output.T, torch.arange(len(output)))


def balanced(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A term for how evenly samples are spread over classes."""
    return functional.cross_entropy(output, target) + 0.1 * output.softmax(1).mean(0).pow(2).sum()


def weighted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, target, weight=torch.tensor([1.0, 3.0]))


def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.tensor([1.0, 3.0])
    return functional.cross_entropy(output, target, weight=weight, reduction="sum"), weight[target].sum()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.last = nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(values)))


class Counts(nn.Module):
    """Counts samples and calls, keeps a mean, and puts samples into a queue."""

    def __init__(self, queue: bool) -> None:
        super().__init__()
        self.last, self.queue = nn.Linear(4, 2), queue
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("calls", torch.tensor(0.0))
        self.register_buffer("classes", torch.zeros(2))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("bank", torch.zeros(64, 4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output = self.last(values)
        self.seen += len(values)
        self.calls += 1
        self.classes += output.detach().argmax(1).bincount(minlength=2)
        self.mean.mul_(0.9).add_(values.mean(0), alpha=0.1)
        if self.queue:
            self.bank[: len(values)] = values
        return output


def start(model: nn.Module, **more: Any) -> paceline.Session:
    torch.manual_seed(0)
    values = torch.randn(96, 4)
    data = TensorDataset(values, (values.sum(1) > 0).long())
    given: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1), "loss": functional.cross_entropy}
    return paceline.start(**{"model": model, "data": data, "batch": 32, **given} | more)


def notes(session: paceline.Session) -> list[str]:
    return [note for batch in session.batches(steps=1) for note in session.step(batch).notes]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("loss", [contrastive, balanced, weighted])
def test_a_loss_over_several_samples_is_named(loss: Any, exact: bool) -> None:
    (text,) = [note for note in notes(start(Net(), loss=loss, exact=exact)) if WARNS in note]
    assert "with 8 microbatches it is not the loss of the whole batch" in text and "(sum, count)" in text


@pytest.mark.parametrize(
    "given", [{}, {"loss": counted}, {"loss": contrastive, "microbatches": 1}], ids=["mean", "counted", "whole"]
)
def test_the_mean_of_its_parts_is_not_named(given: dict[str, Any]) -> None:
    assert not [note for note in notes(start(Net(), **given)) if WARNS in note]


def test_nothing_is_left_behind() -> None:
    prints = set()
    for loss in (counted, lambda output, target: counted(output, target)):
        torch.manual_seed(3)
        session = start(Net(), loss=loss, exact=True)
        if loss is not counted:
            session._context.probe_results.repeatable = True
        for batch in session.batches(steps=4):
            session.step(batch)
        prints.add(session.fingerprint())
    assert len(prints) == 1


def test_what_counts_samples_is_added_up() -> None:
    model = Counts(queue=False)
    session = start(model, exact=True)
    for batch in session.batches(steps=3):
        session.step(batch)
    assert int(model.seen) == model.classes.sum() == 96
    assert float(model.calls) == 3
    assert not any("puts samples into" in note for note in session._context.probe_results.warnings)


def test_a_queue_is_named() -> None:
    (text,) = [note for note in notes(start(Counts(queue=True))) if "puts samples into" in note]
    assert "'bank'" in text and "microbatches=1" in text


SCRIPT = """
import sys
sys.path.insert(0, FOLDER)
from test_coupling import Counts, start
import torch

torch.manual_seed(0)
model = Counts(queue=False)
session = start(model, exact=True, strategy=STRATEGY, timeout_seconds=30)
for batch in session.batches(steps=4):
    session.step(batch)
print('{"seen": %d, "fingerprint": "%s"}' % (model.seen, session.fingerprint()))
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["allreduce", "stealing", "parameter-server"])
def test_on_several_workers(printed: Printed, tmp_path: Path, strategy: str) -> None:
    script = SCRIPT.replace("FOLDER", repr(str(Path(__file__).parent)))
    (alone,) = printed(script.replace("STRATEGY", "'single'"), 1, tmp_path / "one", deadline=60)
    assert alone["seen"] == 128
    for one in printed(script.replace("STRATEGY", repr(strategy)), 3, tmp_path / "three", deadline=60):
        assert one == alone


class Averages(nn.Module):
    """An average that begins with zero grows with the samples at first, but is none of what is added up."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)
        self.register_buffer("used", torch.zeros(2))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output = self.last(values)
        self.used.mul_(0.8).add_(output.detach().argmax(1).bincount(minlength=2), alpha=0.2)
        return output


def test_an_average_of_counts_is_not_added_up() -> None:
    model = Averages()
    session = start(model, exact=True)
    for batch in session.batches(steps=6):
        session.step(batch)
    assert float(model.used.min()) >= 0 and float(model.used.sum()) < 4
