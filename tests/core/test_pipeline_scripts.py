"""A script may do with its model between steps what it may do in one process: the bits stay the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

SCRIPT = """
import json, os
import torch
from torch import nn
from torch.nn import functional
from pipeline_cases import CUT
from subjects import classes, tell
import paceline


class Normal(nn.Module):
    \"\"\"Its output depends on a buffer that each forward pass changes.\"\"\"

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.utils.parametrizations.spectral_norm(nn.Linear(12, 12)) for _ in range(3))
        self.head = nn.Linear(12, 4)

    def forward(self, values):
        for layer in self.layers:
            values = layer(values).tanh()
        return self.head(values)


def changing_mode(session, step):
    model.norm.train(step not in (2, 3))


def holding_views(session, step):
    if step == 0:
        kept.extend(parameter.data for parameter in model.parameters())
    if step == 3:
        session.evaluate(given["data"])
        assert all(torch.equal(one, parameter) for one, parameter in zip(kept, model.parameters(), strict=True))


def clamping(session, step):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.2)


torch.manual_seed(3)
kept = []
act = globals()[os.environ["ACT"]] if os.environ["ACT"] else lambda session, step: None
given = CUT["skips"]()
if not os.environ["ACT"]:
    given["model"] = Normal()
model = given["model"]
settings = json.loads(os.environ["GIVEN"])
session = paceline.start(**given, strategy="pipeline", timeout_seconds=30, **settings)
losses = []
for batch in session.batches(steps=6):
    act(session, batch.step)
    losses.append(session.step(batch).loss.hex())
tell(fingerprint=session.fingerprint(), losses=losses, evaluation=session.evaluate(given["data"]).hex())
"""
Train = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def train(printed: Printed, tmp_path: Path) -> Train:
    def run(workers: int, act: str, **pipeline: Any) -> list[dict[str, Any]]:
        given = {"exact": pipeline.get("schedule") != "pipedream", "pipeline": pipeline}
        return printed(SCRIPT, workers, tmp_path, environment={"ACT": act, "GIVEN": json.dumps(given)})

    return run


def test_pipedream_computes_again_what_it_computed(train: Train) -> None:
    """With the buffers of then, though updates have changed them since."""
    way = {"schedule": "pipedream", "cut": ["layers.1"]}  # what comes out depends on the cut
    assert train(2, "", recompute=True, **way) == train(2, "", **way)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("act", ["changing_mode", "holding_views", "clamping"])
def test_what_a_script_does_between_steps(train: Train, act: str) -> None:
    (alone,) = train(1, act)
    assert train(2, act) == [alone] * 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", [False, True])
def test_another_mode_in_a_pipeline_that_never_runs_empty(train: Train, recompute: bool) -> None:
    """Not the same bits, but all workers have the same model in the end."""
    first, second = train(2, "changing_mode", schedule="pipedream", recompute=recompute)
    assert first["fingerprint"] == second["fingerprint"] and first["evaluation"] == second["evaluation"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_what_is_computed_again_starts_from_the_same_buffers(train: Train, schedule: str) -> None:
    (alone,) = train(1, "")
    assert train(2, "", schedule=schedule, recompute=True) == [alone] * 2
