"""A layer that is replaced after ``paceline.start`` is named by every strategy, and other changes are left alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import CheckpointError, InputError
from paceline.testing.ranks import Ended

Printed = Callable[..., list[dict[str, Any]]]
Run = Callable[..., list[Ended]]

HEAD = """
from functools import partial
from torch import nn
from torch.nn import functional
import torch
import paceline
from subjects import classes, mlp, tell

def start(model, **settings):
    given = dict(model=model, optimizer=partial(torch.optim.AdamW, lr=1e-2), loss=functional.cross_entropy)
    return paceline.start(**given | dict(data=classes(128), batch=32, timeout_seconds=60) | settings)

STRATEGIES = dict(
    allreduce={}, stealing=dict(strategy="stealing"), servers=dict(strategy="parameter-server"),
    pipeline=dict(strategy="pipeline"), pipedream=dict(strategy="pipeline", pipeline=dict(schedule="pipedream")),
    local=dict(strategy="local-sgd"), backup=dict(strategy="backup"),
)
"""

REPLACED = """
found = {}
for name, settings in STRATEGIES.items():
    model = mlp()
    session = start(model, **settings)
    try:
        for batch in session.batches(steps=4):
            if batch.step == 1:
                model[2] = nn.Linear(16, 4)
            session.step(batch)
    except paceline.InputError as error:
        found[name] = [batch.step, str(error)]
tell(found=found, strategies=list(STRATEGIES))
"""


@pytest.mark.promise("docs/train.md", "a parameter that is added or replaced later", "is an error at the next step")
def test_a_new_layer_is_named(printed: Printed, tmp_path: Path) -> None:
    for told in printed(HEAD + REPLACED, 2, tmp_path):
        assert list(told["found"]) == told["strategies"]
        for strategy, (step, said) in told["found"].items():
            assert step == 1
            layer = "The layer '2' of the model was replaced after paceline.start, but a pipeline computes with"
            weight = "The parameter '2.weight' was replaced after paceline.start, and only those of "
            assert said.startswith(layer if strategy.startswith("pipe") else weight)


ASYNCHRONOUS = """
model = mlp()
session = start(model, SETTINGS)
for batch in session.batches(steps=40):
    if batch.step == 1:
        model[2].weight = nn.Parameter(torch.ones(4, 16))
    session.step(batch)
"""


@pytest.mark.parametrize("settings", ["strategy='hogwild'", "strategy='parameter-server', server={'mode': 'async'}"])
def test_a_new_parameter_is_named_where_nobody_waits(ranks: Run, tmp_path: Path, settings: str) -> None:
    everyone = ranks(HEAD + ASYNCHRONOUS.replace("SETTINGS", settings), 2, tmp_path)
    assert all(one.code for one in everyone)
    assert any("The parameter '2.weight' was replaced after paceline.start" in one.err for one in everyone)


MADE_LATE = """
class Late(nn.Module):
    # makes a layer when it knows the width, and one that it does not train
    def __init__(self, trains):
        super().__init__()
        self.first, self.trains, self.last = nn.Linear(12, 4), trains, None

    def forward(self, values):
        if self.last is None:
            torch.manual_seed(3)
            self.last = nn.Linear(4, 4).requires_grad_(self.trains)
        return self.last(self.first(values))

found = []
for trains in (True, False):
    torch.manual_seed(2)
    session = start(Late(trains), microbatches=4)
    try:
        for batch in session.batches(steps=3):
            session.step(batch)
        found.append(batch.step)
    except paceline.InputError as error:
        found.append(str(error))
tell(found=found)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_layer_made_in_the_first_forward_pass(printed: Printed, tmp_path: Path, workers: int) -> None:
    for told in printed(HEAD + MADE_LATE, workers, tmp_path):
        said, steps = told["found"]
        assert said.startswith("The parameter 'last.weight' was added after paceline.start") and steps == 2


LEFT_ALONE = """
found = set()
for settings in ({}, dict(strategy="stealing"), dict(strategy="parameter-server"),
                 dict(average="ema"), dict(recompute=["Tanh"])):
    for changes in (False, True):
        model = mlp()
        session = start(model, exact=True, **settings)
        for batch in session.batches(steps=4):
            if changes and batch.step == 2:
                model[1] = nn.Sequential(nn.Identity(), nn.Tanh())
                model.add_module("teacher", nn.Linear(2, 2).requires_grad_(False))
                del model.teacher
            session.step(batch)
        if "average" not in settings:
            found.add(session.fingerprint())
tell(hashes=len(found))
"""


def test_a_layer_without_parameters_may_be_replaced(printed: Printed, tmp_path: Path) -> None:
    for told in printed(HEAD + LEFT_ALONE, 2, tmp_path):
        assert told["hashes"] == 1


def trained_with_a_late_buffer(folder: Path, every: int | None) -> paceline.Session:
    torch.manual_seed(0)
    model, data = nn.Linear(4, 2), TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
    session = paceline.start(
        model=model, optimizer=partial(torch.optim.SGD, lr=0.1), loss=nn.functional.mse_loss, data=data, batch=8,
        checkpoint={"every": every, "directory": folder},
    )  # fmt: skip
    for batch in session.batches(steps=4):
        session.step(batch)
        if batch.step == 1:
            model.register_buffer("late", torch.ones(2))
    return session


def test_a_late_buffer_is_refused_where_it_would_be_saved(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"The buffer 'late' was added after paceline.start.*before paceline.start"):
        trained_with_a_late_buffer(tmp_path, every=4)


def test_a_late_buffer_is_named_once_where_nobody_else_needs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = trained_with_a_late_buffer(tmp_path, every=None)
    assert sum("The buffer 'late' was added" in one.message for one in caplog.records) == 1
    with pytest.raises(CheckpointError, match="The buffer 'late' was added"):
        session.save()
