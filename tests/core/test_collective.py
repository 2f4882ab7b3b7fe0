"""Gradients added up by the back end's own all-reduce."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

SCRIPT = """
import os
from functools import partial
import torch
import paceline
from subjects import tell

torch.manual_seed(0)
layers = [torch.nn.Linear(12, 64), torch.nn.BatchNorm1d(64), torch.nn.Tanh(), torch.nn.Linear(64, 4)]
inputs = torch.randn(203, 12, dtype=torch.float64)
session = paceline.start(
    model=torch.nn.Sequential(*layers).double(),
    optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    loss=torch.nn.functional.cross_entropy,
    data=torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1)),
    batch=50,
    clip_norm=1.0,
    **eval(os.environ["SETTINGS"]),
)
for batch in session.batches(steps=30):
    report = session.step(batch)
tell(loss=report.loss, norm=report.gradient_norm, fingerprint=session.fingerprint())
"""


def settings(**given: Any) -> dict[str, str]:
    return {"SETTINGS": repr(given)}


@pytest.fixture(scope="module")
def alone(printed: Printed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (one,) = printed(SCRIPT, 1, tmp_path_factory.mktemp("alone"), environment=settings())
    return one


@pytest.mark.sampled(1)
@pytest.mark.parametrize("machines", [(2,), (3,), (1, 1), (2, 2)], ids=str)
def test_the_loss_is_that_of_one_process_up_to_rounding(
    printed: Printed, tmp_path: Path, alone: dict[str, Any], machines: tuple[int, ...]
) -> None:
    environment = settings(reduction="collective", bucket_megabytes=0.002) | {"PACELINE_RUN": str(tmp_path)}
    everyone = printed(SCRIPT, sum(machines), tmp_path, machines=machines, environment=environment)
    assert len({one["fingerprint"] for one in everyone}) == 1
    for one in everyone:
        assert one["loss"] == pytest.approx(alone["loss"], rel=1e-9)
        assert one["norm"] == pytest.approx(alone["norm"], rel=1e-9)
    events = [json.loads(line) for line in (tmp_path / "events" / "rank-0.jsonl").read_text().splitlines()]
    (chosen,) = (event for event in events if event["event"] == "reduction" and event["what"] == "gradients")
    assert (chosen["kind"], chosen["bucket_bytes"]) == ("collective", 2000)
    assert chosen["buckets"] > 1


def test_exact_is_refused(ranks: Any, tmp_path: Path) -> None:
    environment = settings(reduction="collective", exact=True)
    for one in ranks(SCRIPT, 2, tmp_path, environment=environment):
        assert one.code == 2
        assert "strategy 'allreduce' with these settings cannot give the same bits for any number of workers" in one.err
        assert """exact=True, set reduction="tree" or exact="fixed-point", or use strategy 'stealing'.""" in one.err
