"""What depends on what was computed or read before is found in the first step, and the search leaves no trace."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import paceline
from paceline.errors import InputError

GLOBAL = numpy.random.default_rng(0)


class Model(nn.Module):
    """Depends on its past in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.generator = torch.Generator().manual_seed(1)
        self.dice = random.Random(3)
        self.calls = 0
        self.bank = torch.zeros(4)
        self.memory = {"past": [torch.zeros(4)]}
        self.cache: torch.Tensor | None = None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.cache = torch.ones(4) if self.cache is None else self.cache  # made once, which is no harm
        self.last = values = functional.dropout(self.norm(values), 0.1) * self.cache  # nor this
        if self.kind == "generator":
            values = values + torch.randn(values.shape, generator=self.generator)
        elif self.kind == "dice" and self.dice.random() < 1e-9:
            values = -values
        elif self.kind == "calls":
            self.calls += 1
            values = values if self.calls < 1000 else -values
        elif self.kind == "bank":
            self.bank = 0.9 * self.bank + 0.1 * values.detach().mean(0)
            values = values + self.bank
        elif self.kind == "past":
            self.memory["past"][0].mul_(0.9).add_(values.detach().mean(0))
        elif self.kind == "GLOBAL":
            values = values + float(GLOBAL.random())
        elif self.kind == "rounding":
            values = values + 1e-5 * random.SystemRandom().random()
        return self.layer(values)


NAMES = {
    "generator": "model.generator",
    "dice": "model.dice",
    "calls": "model.calls",
    "bank": "model.bank",
    "past": "model.memory['past'][0]",
    "GLOBAL": "GLOBAL",
}


class Data(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Draws from the global generators, or from its own in one of several ways."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.values = torch.randn(48, 4)
        self.rng = numpy.random.default_rng(0)
        self.transforms = [random.Random(1)]
        self.reads = 0

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads += 1
        value = self.values[place] + 0.1 * torch.randn(4)
        if self.kind == "rng":
            value = value + float(self.rng.normal())
        elif self.kind == "transforms" and self.transforms[0].random() < 1e-9:
            value = -value
        elif self.kind == "reads":
            value = value * self.reads
        return value, (value.sum() > 0).long()


SOURCES = {
    "rng": "draws from data.rng",
    "transforms": "draws from data.transforms[0]",
    "reads": "depends on earlier reads",
}


def start(exact: bool, kind: str = "", source: str = "", **more: Any) -> paceline.Session:
    torch.manual_seed(0)
    values = torch.randn(48, 4)
    given: dict[str, Any] = {
        "model": Model(kind),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "loss": functional.cross_entropy,
        "data": Data(source) if source else TensorDataset(values, (values.sum(1) > 0).long()),
        "batch": 16,
        "exact": exact,
    }
    return paceline.start(**given | more)


def train(session: paceline.Session) -> paceline.Report:
    reports = [session.step(batch) for batch in session.batches(steps=2)]
    return reports[-1]


@pytest.mark.promise(
    "docs/audits.md", "With `exact` such a model or data set is refused, and the message names the attribute."
)
@pytest.mark.parametrize("kind", NAMES)
def test_a_model_that_remembers_is_refused_with_exact(kind: str) -> None:
    with pytest.raises(InputError) as refused:
        train(start(True, kind))
    assert f"changes {NAMES[kind]}" in str(refused.value)


@pytest.mark.promise("docs/audits.md", "Without, there is one warning, in `report.notes` too")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [kind for kind in NAMES if kind != "GLOBAL"])
def test_without_exact_it_trains_as_if_nobody_had_looked(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = start(False, kind)
    assert sum("forward pass changes" in note or "computed twice" in note for note in train(session).notes) == 1
    monkeypatch.setattr("paceline.step.probes.first_step.check_repeatable", lambda *_: None)
    unwatched = start(False, kind)
    train(unwatched)
    assert session.fingerprint() == unwatched.fingerprint()


@pytest.mark.parametrize("source", SOURCES)
def test_a_data_set_with_a_past_is_refused_with_exact(source: str) -> None:
    with pytest.raises(InputError, match="gives a different sample") as refused:
        train(start(True, source=source))
    assert SOURCES[source] in str(refused.value)


def test_without_exact_it_is_read_as_if_nobody_had_looked(caplog: pytest.LogCaptureFixture) -> None:
    prints = []
    for looks in (True, False):
        session = start(False, source="rng")
        if not looks:
            session._context.feed._data._stops = None
        train(session)
        prints.append(session.fingerprint())
    assert prints[0] == prints[1]
    assert sum("data.rng" in record.getMessage() for record in caplog.records) == 1


def test_what_is_keyed_is_not_refused() -> None:
    assert train(start(True, source="keyed")).step == 1


def test_rounding_matters_with_exact_only() -> None:
    """Atomic additions of a GPU differ in it."""
    assert not any("computed twice" in note for note in train(start(False, "rounding")).notes)
    with pytest.raises(InputError, match="computed twice"):
        train(start(True, "rounding"))


def test_a_microbatch_that_is_changed_is_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may scale its input in place, and take the target out of a microbatch."""

    def forward(model: nn.Module, data: dict[str, torch.Tensor]) -> torch.Tensor:
        target = data.pop("target")
        return functional.cross_entropy(model(data["values"].mul_(2)), target)

    def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
        values, targets = zip(*samples, strict=True)
        return {"values": torch.stack(values), "target": torch.stack(targets)}

    prints = []
    for _ in range(2):
        session = start(True, source="keyed", loss=None, forward=forward, collate=collate)
        train(session)
        prints.append(session.fingerprint())
        monkeypatch.setattr("paceline.step.probes.first_step.check_repeatable", lambda *_: None)
    assert prints[0] == prints[1]


@pytest.mark.parametrize("exact", [True, False])
def test_updates_in_the_backward_pass_are_refused(exact: bool) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(
        InputError, match="The backward pass changes the parameter 'weight', as a hook that makes updates"
    ):
        train(start(exact, model=model))
