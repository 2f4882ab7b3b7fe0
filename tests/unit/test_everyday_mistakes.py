"""Mistakes that a new user makes in a script for one process: each has one sentence with its cure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import paceline
from paceline.errors import InputError

Dataset = torch.utils.data.TensorDataset


def pairs(count: int = 16) -> Dataset:
    return Dataset(torch.linspace(0, 1, count * 4).reshape(count, 4), torch.arange(count) % 3)


def start(**given: Any) -> paceline.Session:
    usual = {
        "model": torch.nn.Linear(4, 3),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "loss": torch.nn.functional.cross_entropy,
        "data": pairs(),
        "batch": 8,
    }
    return paceline.start(**(usual | given))


def train(steps: int = 2, **given: Any) -> paceline.Session:
    session = start(**given)
    for batch in session.batches(steps=steps):
        session.step(batch)
    return session


WARNED: dict[str, tuple[Callable[[], object], str]] = {
    "a batch larger than the data": (
        lambda: train(batch=100),
        "batch = 100 is more than the 16 samples of the data set: each step takes all of them, and",
    ),
    "no steps": (lambda: train(steps=0), "session.batches(steps=0) is an empty loop, which trains nothing."),
    "no epochs": (lambda: list(start().epochs(0)), "session.epochs(0) is an empty loop, which trains nothing."),
}

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no samples": (
        lambda: start(data=pairs(0)),
        r"The data set is empty\. data, of type TensorDataset, has the length 0",
    ),
    "less than a batch": (lambda: start(batch=20, drop_last=True), r"Give a smaller batch, or leave drop_last out\."),
}


@pytest.mark.parametrize("name", WARNED)
def test_one_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    act, says = WARNED[name]
    act()
    assert [one.getMessage().startswith(says) for one in caplog.records if one.levelname == "WARNING"] == [True]


@pytest.mark.parametrize("name", REFUSED)
def test_one_error(name: str) -> None:
    act, says = REFUSED[name]
    with pytest.raises(InputError, match=says):
        act()
