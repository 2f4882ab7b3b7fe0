"""``paceline plan`` with a real script: a model that cannot be cut, and a saved plan that ``paceline run`` starts."""

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
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
session = paceline.start(
    model=model, optimizer=partial(torch.optim.SGD, lr=0.05),
    loss=lambda output, target: torch.nn.functional.mse_loss(output, target) + model[0].weight.pow(2).sum(),
    data=torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch=16,
)
for batch in session.batches(epochs=1):
    report = session.step(batch)
session.print("steps", report.step)
"""


@pytest.mark.slow
def test_a_saved_plan_of_a_model_that_cannot_be_cut(forked_paceline: Callable[..., Any], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    unsaved = forked_paceline("plan", "-n", "1", "--save", "none/plan.json", script)
    assert unsaved.code == 2 and "a folder that exists" in unsaved.err and "measuring" not in unsaved.err
    given = "--tolerance", "bits", "--set", "seed=3"
    shown = forked_paceline("plan", "-n", "1", "--save", "plan.json", *given, script)
    assert shown.code == 0, shown.err
    assert "No pipelines, as the model cannot be cut: The loss uses the parameter '0.weight'" in shown.out
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert (saved["strategy"], saved["workers"], saved["settings"]) == ("allreduce", 1, {"seed": 3, "exact": True})
    assert not (tmp_path / "runs").exists() and not (tmp_path / "checkpoints").exists()
    ran = forked_paceline("run", "--plan", "plan.json", script)
    assert ran.code == 0 and "steps " in ran.out, ran.err


@pytest.mark.slow
def test_a_script_that_fails_is_reported_without_files_that_are_gone(
    forked_paceline: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('no data')")
    failed = forked_paceline("plan", "-n", "1", tmp_path / "train.py")
    assert failed.code == 1 and "ValueError: no data" in failed.err, failed.err
    assert "output of every worker" not in failed.err and "failure.txt" not in failed.err
