"""What decides the bits besides the script: compared among workers that must be exact, and kept in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer

from paceline.step.numerics import float32_precision
from paceline.testing.ranks import Process, Worker, run

SCRIPT = """
import os
from functools import partial
import torch
import paceline

if "TF32" in os.environ:
    torch.backends.cuda.matmul.allow_tf32 = True
torch.manual_seed(0)
session = paceline.start(
    model=torch.nn.Linear(4, 1), optimizer=partial(torch.optim.SGD, lr=0.1), loss=torch.nn.functional.mse_loss,
    data=torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch=8,
    exact=True, checkpoint={"directory": os.environ["SAVED"], "every": 2}, resume="auto",
)
for batch in session.batches(steps=4):
    session.step(batch)
"""
OTHER: list[tuple[str, dict[str, str]]] = [
    ("float32 precision", {"TF32": "1"}),
    ("cublas workspace", {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}),
]


@pytest.mark.parametrize(("named", "more"), OTHER)
def test_a_worker_computes_otherwise(fork_server: ForkServer, tmp_path: Path, named: str, more: dict[str, str]) -> None:
    def second_is_other(workers: list[Worker]) -> Sequence[Process]:
        workers[1].environment.update(more)
        return fork_server.start_workers(workers)

    for one in run(SCRIPT, 2, tmp_path, environment={"SAVED": str(tmp_path / "saved")}, start=second_is_other):
        assert one.code == 3, one.err
        assert f"The workers do not agree on {named}: rank 0: " in one.err


def test_a_resumed_run_computes_otherwise(ranks: Any, tmp_path: Path) -> None:
    def alone(**more: str) -> Any:
        (one,) = ranks(SCRIPT, 1, tmp_path, environment={"SAVED": str(tmp_path / "saved"), **more})
        return one

    assert alone().code == 0
    again = alone(CUBLAS_WORKSPACE_CONFIG=":16:8")
    assert again.code == 4 and "with the same bits: cublas was 'default' and is now ':16:8'" in again.err, again.err


def test_what_a_variable_forces_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert float32_precision().endswith("NVIDIA_TF32_OVERRIDE=0")


def test_the_older_spelling_of_torch_can_be_read() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        assert float32_precision().startswith("gpu tf32 ")
        torch.backends.cuda.matmul.allow_tf32 = False
        assert not float32_precision().startswith("gpu tf32 ")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
