"""A stage becomes slow: the model is cut again while it trains, and nobody can tell from the result."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

SCRIPT = """
import os
import time
import torch
from types import SimpleNamespace
from torch import nn
from functools import partial
from subjects import classes, measure_alike, tell
import paceline
from paceline.strategies.pipeline import executor

measure_alike()
passed, forward = 0.0, executor.Executor._forward

def timed(own, operation):  # time passes as layers are computed: each takes three times as long on rank 1
    global passed
    layers = {name.partition(".")[0] for name in own._stages[operation.stage].trained}
    passed += len(layers) * (3 if session.rank == 1 else 1)
    return forward(own, operation)

executor.time = SimpleNamespace(perf_counter=lambda: passed, time=time.time)
executor.Executor._forward = timed

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Linear(12, 12)

    def forward(self, values):
        return self.weights(values).tanh()

torch.manual_seed(3)
model = nn.Sequential(*(Layer() for _ in range(6)), nn.Linear(12, 4))
session = paceline.start(
    model=model, optimizer=partial(torch.optim.AdamW, lr=1e-2), loss=nn.functional.cross_entropy, data=classes(96),
    batch=24, microbatches=4, exact=True, strategy=os.environ["STRATEGY"], timeout_seconds=30,
)
reports = [session.step(batch) for batch in session.batches(steps=23)]
tell(loss=reports[-1].loss, fingerprint=session.fingerprint(), notes=reports[-1].notes)
"""


@pytest.mark.slow
def test_layers_move_away_from_a_slow_worker(printed: Printed, tmp_path: Path) -> None:
    (alone,) = printed(SCRIPT, 1, tmp_path / "one", environment={"STRATEGY": "single"})
    both: list[dict[str, Any]] = printed(
        SCRIPT, 2, tmp_path / "two", environment={"STRATEGY": "pipeline", "PACELINE_RUN": str(tmp_path)}
    )
    lines = [json.loads(line) for path in tmp_path.rglob("rank-0.jsonl") for line in path.read_text().splitlines()]
    cuts = [[len(stage) for stage in line["stages"]] for line in lines if line["event"] == "cut"]
    assert len(cuts) == 2 and cuts[1][0] > cuts[0][0], cuts
    assert any(line["event"] == "rebalance" and line["stage"] == 1 for line in lines)
    again = next(place for place, line in enumerate(lines) if line.get("again"))
    assert {line["step"] for line in lines[:again] if line["event"] == "forward"} == {*range(20)}
    assert {line["step"] for line in lines[again:] if line["event"] == "forward"} == {20, 21, 22}
    for one in both:
        assert (one["loss"], one["fingerprint"]) == (alone["loss"], alone["fingerprint"])
        assert any("stage 1 takes" in note for note in one["notes"])
