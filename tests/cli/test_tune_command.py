"""``paceline tune`` with a real script: the rates of the branches, and the same advice on any number of workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import torch, paceline
from functools import partial
torch.manual_seed(0)
inputs = torch.randn(256, 8)
session = paceline.start(
    model=torch.nn.Linear(8, 1), optimizer=partial(torch.optim.SGD, lr=0.05), loss=torch.nn.functional.mse_loss,
    data=torch.utils.data.TensorDataset(inputs, inputs @ torch.randn(8, 1)), batch=16, exact=True, resume="auto",
    schedule=partial(torch.optim.lr_scheduler.LinearLR, start_factor=1e-9, total_iters=1000), checkpoint={"every": 5},
)
for batch in session.batches(epochs=4):
    session.step(batch)
"""


@pytest.mark.slow
def test_branches_have_their_rates_on_any_number_of_workers(
    forked_paceline: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    given = "tune", "--json", "--branches", "1", "--steps", "40", "--samples", "512"
    two = forked_paceline(*given, "-n", "2", tmp_path / "train.py")
    assert two.code == 0, two.err
    found = json.loads(two.out)
    folder = (tmp_path / found["page"]).parent
    assert "<svg" in (folder / "tune.html").read_text() and not list(folder.glob("*/checkpoints/step-*"))

    def steps(name: str) -> list[dict[str, Any]]:
        lines = (folder / name / "events" / "rank-0.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["event"] == "step"]

    rates = [one["learning_rate"] for one in steps("rate-1")]
    assert len(rates) > 20 and rates == pytest.approx([0.05 * 10 ** (-3 + 6 * at / 39) for at in range(len(rates))])
    for multiple in (0.5, 1, 2, 4, 8):
        taken = steps(f"batch-{round(16 * multiple)}-1")
        assert {(one["learning_rate"], one["samples"]) for one in taken} == {(0.05 * multiple, 16 * multiple)}
        assert len(taken) == 512 / 16 / multiple
    assert found["batch"]["value"] in (8, 16, 32, 64, 128) and found["batch"]["low"] is None
    alone = forked_paceline(*given, "--only", "rate", tmp_path / "train.py")
    assert json.loads(alone.out)["learning_rate"] == found["learning_rate"]
