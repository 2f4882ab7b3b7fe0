"""A loss that is not repeatable is told as such, and not as a loss over several samples."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.step.probes.draws import RecordedDraws

DATA = torch.utils.data.TensorDataset(torch.linspace(0, 1, 128).reshape(32, 4), torch.arange(32) % 3)


class Remembers(nn.Linear):
    """Adds what it computed in the pass before."""

    last: torch.Tensor | float = 0.0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output = super().forward(values) + self.last
        self.last = output.detach().mean()
        return output


def warnings_of(caplog: pytest.LogCaptureFixture, **given: Any) -> list[str]:
    torch.manual_seed(0)
    usual = {"model": nn.Linear(4, 3), "loss": nn.functional.cross_entropy}
    session = paceline.start(
        optimizer=partial(torch.optim.SGD, lr=0.1), data=DATA, batch=32, audit="off", **(usual | given)
    )
    for batch in session.batches(steps=1):
        session.step(batch)
    return [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]


def test_a_state_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    (text,) = warnings_of(caplog, model=Remembers(4, 3), loss=squared)
    assert "changes model.last" in text


def test_a_loss_that_drifts_slowly(caplog: pytest.LogCaptureFixture) -> None:
    passes = itertools.count()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target) * (1 + 0.001 * next(passes))

    (text,) = warnings_of(caplog, loss=loss)
    assert text.startswith("The same microbatch computed twice gives different results: the loss differs")
    assert "or reads the clock. Each worker" in text


def test_a_loss_over_several_samples_is_still_told(caplog: pytest.LogCaptureFixture) -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target) + output.std(0).mean()

    (text,) = warnings_of(caplog, loss=loss)
    assert text.startswith("The loss looks at several samples at once")


@pytest.mark.parametrize("sizes", [(2, 6), (4,)])
def test_each_of_two_cuts_is_tried(caplog: pytest.LogCaptureFixture, sizes: tuple[int, ...]) -> None:
    """Of the 8 samples of two microbatches: after 2 and after 4 of them."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target) + 0.1 * (len(target) in sizes)

    (text,) = warnings_of(caplog, loss=loss)
    assert text.startswith("The loss looks at several samples at once: for 8 samples it is")


def test_numbers_that_only_a_later_pass_draws_are_unknown() -> None:
    draws = RecordedDraws()
    for draw, unknown in ((torch.zeros, False), (torch.zeros, False), (torch.rand, True)):
        with draws.pass_of(lambda before, shape: before):
            draw(2)
        assert draws.unknown is unknown
