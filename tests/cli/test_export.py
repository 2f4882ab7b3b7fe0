"""``paceline export`` writes what ``session.export`` writes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline as library
from paceline.cli.export import Dtype

Paceline = Callable[..., Any]


class Tied(nn.Module):
    """Has a tied weight, a counter, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("ones", torch.ones(4), persistent=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(self.first(self.norm(features)) * self.ones)
        return hidden


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the checkpoints of a run, and what its session has exported at the end."""
    torch.manual_seed(0)
    inputs = torch.randn(32, 4)
    session = library.start(
        model=Tied(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=nn.functional.mse_loss,
        data=torch.utils.data.TensorDataset(inputs, inputs.flip(1)),
        batch=16,
        average="ema",
        checkpoint={"directory": str(tmp_path / "checkpoints"), "every": 2},
    )
    for batch in session.batches(steps=6):
        session.step(batch)
    session.save()
    session.export(tmp_path / "session.pt", dtype=torch.bfloat16)
    with session.averaged():
        session.export(tmp_path / "averaged.pt")
    return tmp_path


@pytest.mark.promise(
    "paceline/cli/export.py", "The file equals the one that session.export() writes after the step of the checkpoint."
)
def test_the_file_is_that_of_the_session(folder: Path, paceline: Paceline) -> None:
    result = paceline("export", folder / "checkpoints", "one.pt", "--dtype", "bfloat16")
    assert result.code == 0, result.err
    assert "step-000006" in result.out
    assert "9 tensors" in result.out
    written, expected = (torch.load(folder / name) for name in ("one.pt", "session.pt"))
    assert written.keys() == expected.keys() == Tied().state_dict().keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    Tied().load_state_dict(written)

    result = paceline("export", folder / "checkpoints/step-000006", "two.safetensors", "--averaged")
    assert result.code == 0, result.err
    from safetensors.torch import load_file

    averaged, expected = load_file(folder / "two.safetensors"), torch.load(folder / "averaged.pt")
    assert averaged.keys() == expected.keys()
    assert all(torch.equal(averaged[name], expected[name]) for name in expected)
    assert not torch.equal(averaged["first.weight"].bfloat16(), written["first.weight"])


def test_what_cannot_be_written_is_said(folder: Path, paceline: Paceline) -> None:
    assert "must end in .safetensors" in paceline("export", "checkpoints", "model.onnx").err
    for place in ("nowhere", "session.pt"):
        result = paceline("export", place, "model.pt")
        assert result.code == 4
        assert place in result.err
        assert "checkpoint" in result.err
    assert not (folder / "model.pt").exists()


def test_the_types_are_those_of_torch() -> None:
    assert all(getattr(torch, one.value).is_floating_point for one in Dtype)
