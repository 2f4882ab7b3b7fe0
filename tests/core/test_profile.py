"""Layers are measured as they are, and the cut that follows is as good as any."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Result
from torch import nn
from torch.nn import functional

import paceline
from paceline.partition.cut import layers_of
from paceline.partition.profile import measure
from paceline.planning.costs import read
from paceline.schedule.balance import Cluster, LayerCost, StageCosts, balance
from paceline.strategies.pipeline.synchronous import StepGradients

CLOCK = [0.0]


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds = seconds
        CLOCK[0] += seconds
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        CLOCK[0] += 2 * context.seconds
        return gradient, None


class Nap(nn.Module):
    """A layer that takes so many seconds of the clock forward, and twice as many backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.layer = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Nap.apply(self.layer(values), self.seconds)
        return output


def measured(model: nn.Module, given: Any, target: Any, repeats: int = 3) -> list[LayerCost]:
    return measure(
        model, layers_of(model, given), given, lambda output: functional.cross_entropy(output, target), repeats
    )


def test_unequal_layers_are_balanced_as_well_as_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.partition.profile.time.perf_counter", lambda: CLOCK[0])
    seconds = [0.050, 0.010, 0.005, 0.045, 0.005, 0.020, 0.050, 0.005]
    model = nn.Sequential(*(Nap(value) for value in seconds))
    costs = measured(model, torch.randn(3, 4), torch.zeros(3, dtype=torch.long))
    for cost, value in zip(costs, seconds, strict=True):
        assert (cost.forward, cost.backward) == pytest.approx((value, 2 * value))
    prices = StageCosts(costs, Cluster())
    for stages in (2, 3, 4):
        best = min(
            max(prices.seconds(*bound) for bound in pairwise([0, *places, len(costs)]))
            for places in combinations(range(1, len(costs)), stages - 1)
        )
        assert balance(costs, stages, Cluster()).slowest <= 1.05 * best


def test_the_bytes_of_each_layer() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4, bias=False))
    costs = measured(model, torch.randn(5, 8), torch.zeros(5, dtype=torch.long), repeats=1)
    assert [cost.name for cost in costs] == ["0", "1", "2"]
    assert [cost.parameter_bytes for cost in costs] == [4 * (8 * 16 + 16), 0, 4 * 16 * 4]
    assert [cost.output_bytes for cost in costs] == [4 * 5 * 16, 4 * 5 * 16, 0]
    assert costs[0].kept_bytes == 4 * 5 * 8
    assert costs[1].kept_bytes == 2 * 4 * 5 * 16  # its input, and its output for the gradient


class Skip(nn.Module):
    """What the first layer gives crosses both boundaries."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        first = self.first(values)
        return self.last(self.dropout(self.norm(first))) + first


def test_a_model_in_one_class_is_measured_and_stays_as_it_was() -> None:
    model = Skip()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    costs = measured(model, torch.randn(5, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(5).long())
    assert [cost.name for cost in costs] == ["first", "norm", "dropout", "last"]
    one = 4 * 5 * 8
    assert [cost.output_bytes for cost in costs] == [one, 2 * one, 2 * one, 0]
    assert all(cost.forward > 0 and cost.backward > 0 for cost in costs)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_what_a_stage_does_besides_its_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in ("paceline.partition.profile", "paceline.planning.profile"):
        monkeypatch.setattr(f"{module}.seconds_now", lambda: CLOCK[0])
    added = StepGradients.on_gradients

    def slow(gradients: StepGradients, stage: int, microbatch: int) -> None:
        CLOCK[0] += 0.5
        added(gradients, stage, microbatch)

    monkeypatch.setattr(StepGradients, "on_gradients", slow)
    monkeypatch.setenv("PACELINE_PROFILE", str(tmp_path / "profile.json"))
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.zeros(32).long())
    model = nn.Sequential(*(Nap(value) for value in (0.050, 0.010, 0.005)))
    with pytest.raises(SystemExit):
        paceline.start(
            model=model, optimizer=partial(torch.optim.SGD, lr=0.1), loss=functional.cross_entropy, data=data, batch=16
        )
    found = read(tmp_path / "profile.json")
    assert (found.pass_seconds, found.half_pass_seconds) == pytest.approx((0.25, 0.25))


Profile = Callable[..., Result]

SCRIPT = """
from functools import partial
import torch
from torch import nn
import paceline
from subjects import Transformer, classes, convnet, images, mlp, Sentences

optimizer = partial(torch.optim.SGD, lr=0.1)
paceline.start({arguments}, optimizer=optimizer, batch=32)
print("trained")
"""
CASES = {
    "list": "model=convnet(), data=images(64), loss=nn.functional.cross_entropy",
    "one class": "model=Transformer(), data=Sentences(64), "
    "collate=lambda rows: (torch.stack(rows), torch.stack(rows)), "
    "loss=lambda output, target: nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())",
    "one layer": "model=nn.Linear(12, 4), data=classes(64), loss=nn.functional.cross_entropy",
    "penalty": "model=(made := mlp()), data=classes(64), "
    "loss=lambda output, target: nn.functional.cross_entropy(output, target) + made[0].weight.norm()",
    "forward": "model=convnet(), data=images(64), "
    "forward=lambda model, data: nn.functional.cross_entropy(model(data[0]), data[1])",
}


@pytest.fixture
def profile(forked_paceline: Callable[..., Result], tmp_path: Path) -> Profile:
    """``paceline profile`` with a script of one of the cases."""

    def run(case: str, *arguments: object) -> Result:
        path = tmp_path / "train.py"
        path.write_text(SCRIPT.format(arguments=CASES[case]))
        return forked_paceline("profile", path, *arguments)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("case", ["list", "forward"])
def test_a_plan_is_written(profile: Profile, tmp_path: Path, case: str) -> None:
    shown = profile(case, "-n", 2, "--stages", 2, "--output", "plan.toml", "--", "--size", "a b")
    assert shown.code == 0, shown.err
    first = shown.out.splitlines()[0]
    assert first.startswith("Sequential, microbatches of 4 samples; link ")
    assert first.endswith(" Mbit/s")
    assert "trained" not in shown.out
    plan = tomllib.loads((tmp_path / "plan.toml").read_text())
    assert plan["strategy"] == "pipeline"
    assert plan["pipeline"]["stages"] == 2
    assert plan["pipeline"]["replicas"] == [1, 1]
    [name] = plan["pipeline"]["cut"]
    assert name in [str(place) for place in range(1, 10)]
    assert f"paceline run -n 2 --plan plan.toml {tmp_path / 'train.py'} --size 'a b'\n" in shown.out


@pytest.mark.slow
def test_the_best_cuts_of_a_model_in_one_class(profile: Profile) -> None:
    shown = profile("one class")
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    assert lines[0] == "Transformer, microbatches of 4 samples"
    assert [line.split()[0] for line in lines[3:7]] == ["embedding", "blocks.0", "blocks.1", "output"]
    assert [line.split()[0] for line in lines[9:12]] == ["2", "3", "4"]
    assert lines[11].endswith("1 1 1 1  blocks.0, blocks.1, output")
    assert "use -n 2 or more to measure the link" in lines[-1]


@pytest.mark.slow
def test_what_cannot_be_profiled(profile: Profile) -> None:
    shown = profile("list", "--output", "plan.toml")
    assert shown.code == 2
    assert "set the number of stages with --stages" in shown.err
    shown = profile("list", "--stages", 0)
    assert (shown.code, shown.out) == (2, "")
    assert "--stages 0" in shown.err and "at least 1" in shown.err
    shown = profile("penalty")
    assert shown.code == 2
    assert "The loss uses the parameter '0.weight'" in shown.err


@pytest.mark.slow
def test_a_model_with_one_layer(profile: Profile) -> None:
    shown = profile("one layer")
    assert shown.code == 2
    assert shown.out.splitlines()[2].startswith("layer ") and "to the next" in shown.out
    assert "stages" not in shown.out
    assert "Linear has one layer" in shown.err and "nothing to cut" in shown.err
