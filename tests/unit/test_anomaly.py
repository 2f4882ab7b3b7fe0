"""The layer in which the first value arises that is not finite."""

import pytest
import torch
from torch import nn

from paceline.diagnostics.replay.anomaly import _rows_of, _Watch


class Scaled(nn.Module):
    """Divides by the norm, which is zero for a sample of zeros."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        norm = values.pow(2).sum(1, keepdim=True).sqrt()
        return values / (norm + 1 if self.kind == "backward" else norm)


class Block(nn.Module):
    """Computes between its layers, too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.scaled = nn.Sequential(Scaled(kind)) if kind in ("layer", "backward") else nn.ReLU()
        self.kind = kind

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.scaled(self.first(values))
        return self.last(1 / values if self.kind == "between" else values)


@pytest.mark.parametrize(
    ("kind", "phase", "layer"),
    [
        ("layer", "forward", "1.scaled.0 (Scaled)"),
        ("between", "forward", "1 (Block), before 1.last (Linear)"),
        ("backward", "backward", "1.scaled.0 (Scaled)"),
        ("nothing", "", None),
    ],
)
def test_the_layer(kind: str, phase: str, layer: str | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Block(kind))
    values = torch.rand(3, 4) + 1
    if kind != "nothing":
        values[1] = 0.0
    if kind == "between":
        model[1].scaled = nn.Identity()
    watch = _Watch(model)
    with watch.hooked():
        model(values).sum().backward()
    assert (watch.phase, watch.layer) == (phase, layer)
    assert _rows_of(watch.value, 3) == ([1] if layer else [])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_layer_that_gets_the_data_first() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 1))
    values = torch.ones(3, 4)
    values[2, 1] = float("inf")
    watch = _Watch(model)
    watch.see("data", "", values)
    with watch.hooked():
        model(values)
    assert (watch.phase, watch.layer, _rows_of(watch.value, 3)) == ("data", "0.0 (Linear)", [2])
