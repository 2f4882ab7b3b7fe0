"""A weight that several stages use, each as often as it likes, gets the gradient that it gets in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

SCRIPT = """
import json, os
from functools import partial
import torch
from torch import nn
from torch.nn import functional
from subjects import classes, tell
import paceline

class Repeated(nn.Module):
    \"\"\"Uses a weight as often as its input says, or so many times.\"\"\"

    def __init__(self, weight, times):
        super().__init__()
        self.weight, self.times = weight, times

    def forward(self, values):
        times = self.times if self.times is not None else int(values.sum().abs() * 10) % 4
        for _ in range(times):
            values = functional.linear(values, self.weight).tanh()
        return values

def train(times, given):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(12, 12) / 3)
    model = nn.Sequential(nn.Linear(12, 12), *(Repeated(weight, one) for one in times), nn.Linear(12, 4))
    session = paceline.start(
        model=model, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), loss=functional.cross_entropy,
        data=classes(96), batch=32, strategy="pipeline", missing_gradient="zero", timeout_seconds=30, **given,
    )
    losses = [session.step(batch).loss for batch in session.batches(steps=5)]
    return {"losses": losses, "fingerprint": session.fingerprint(), "sum": weight.double().sum().item()}

for place, (times, given) in enumerate(json.loads(os.environ["WAYS"])):
    tell(**{str(place): train(times, given)})
"""
OFTEN = [1, 300, 2, 1]
NOBODY_KNOWS = [None, None, None, None]
CUT = ["2", "3", "4"]


def run(
    printed: Printed, workers: int, folder: Path, times: list[int | None], given: list[Any]
) -> list[dict[str, Any]]:
    ways = json.dumps([(times, one) for one in given])
    return printed(SCRIPT, workers, folder, environment={"WAYS": ways}, deadline=100)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("times", [OFTEN, NOBODY_KNOWS], ids=["often", "nobody knows"])
def test_the_bits_are_those_of_one_process(printed: Printed, tmp_path: Path, times: list[int | None]) -> None:
    ways = [{"exact": True, "pipeline": {"schedule": schedule, "cut": CUT}} for schedule in ("interleaved", "zb-v")]
    alone = run(printed, 1, tmp_path / "one", times, ways[:1])[0]["0"]
    for found in run(printed, 2, tmp_path / "two", times, ways):
        assert list(found.values()) == [alone] * len(ways)


def test_else_the_result_differs_by_rounding_only(printed: Printed, tmp_path: Path) -> None:
    ways = [{"pipeline": {"schedule": schedule, "cut": CUT}} for schedule in ("interleaved", "zb-v")]
    alone = run(printed, 1, tmp_path / "one", NOBODY_KNOWS, ways[:1])[0]["0"]
    for found in run(printed, 2, tmp_path / "two", NOBODY_KNOWS, ways):
        for one in found.values():
            assert one["losses"] == pytest.approx(alone["losses"], rel=1e-4)
            assert one["sum"] == pytest.approx(alone["sum"], rel=1e-3)


def test_pipedream_takes_what_there_is(printed: Printed, tmp_path: Path) -> None:
    """A microbatch after which there is an update may use the weight in some stages, or in none."""
    given = {"pipeline": {"schedule": "pipedream", "cut": ["3"], "update_every": 1}}
    first, second = run(printed, 2, tmp_path, NOBODY_KNOWS, [given])
    assert first["0"]["fingerprint"] == second["0"]["fingerprint"]
