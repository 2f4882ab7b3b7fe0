"""The gradient noise scale: what follows from the norms of microbatches and batches."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.noise import EVENT, NoiseRecords, NoiseScale, sentence
from paceline.observe.why import find
from paceline.observe.why.text import sentences

Printed = Callable[..., list[dict[str, Any]]]
SMALL, BATCH, SIZE = 4, 32, 40


def norms(step: int, square: float, variance: float, draws: random.Random) -> list[dict[str, Any]]:
    """The records of a step, for a gradient in ``SIZE`` dimensions whose noise is normal."""

    def mean(samples: int) -> list[float]:
        return [draws.gauss(0, (variance / SIZE / samples) ** 0.5) for _ in range(SIZE)]

    small = mean(SMALL)
    rest = [
        (SMALL * one + (BATCH - SMALL) * other) / BATCH for one, other in zip(small, mean(BATCH - SMALL), strict=True)
    ]
    shift = (square / SIZE) ** 0.5
    lengths = [sum((one + shift) ** 2 for one in values) ** 0.5 for values in (small, rest)]
    head = {"time": float(step), "rank": 0, "generation": 0, "step": step}
    return [
        head | {"event": EVENT, "samples": SMALL, "batch": BATCH, "norm": lengths[0]},
        head | {"event": "step", "gradient_norm": lengths[1], "seconds": 1.0, "waited": 0.0, "awaited": 0.0},
    ]


def scale_of(records: list[dict[str, Any]]) -> NoiseScale | None:
    found = NoiseRecords()
    for record in records:
        found.add(record)
    return found.scale()


def run_of(square: float, variance: float, steps: int = 80, seed: int = 0) -> list[dict[str, Any]]:
    draws = random.Random(seed)
    return [record for step in range(steps) for record in norms(step, square, variance, draws)]


@pytest.mark.parametrize(
    ("square", "variance", "says"),
    [
        (1.0, 200.0, "a batch above 32 would need fewer steps"),
        (1.0, 4.0, "a batch below 32 would need fewer samples"),
        (1.0, 32.0, "the batch of 32 may be right"),
        (0.0, 200.0, "a batch above 32 would need fewer steps"),
    ],
)
def test_the_scale_is_in_its_interval(square: float, variance: float, says: str) -> None:
    """In all but a few of many runs, and the text of the first says what follows from it."""
    found = [scale_of(run_of(square, variance, steps=40, seed=seed)) for seed in range(20)]
    true = variance / square if square else float("inf")
    inside = [one is not None and one.low <= true <= (float("inf") if one.high is None else one.high) for one in found]
    assert sum(inside) >= 17
    first = found[0]
    assert first is not None and first.batch == BATCH and first.steps == 20
    assert says in sentence(first)


def test_an_interval_without_an_end_that_holds_the_batch() -> None:
    assert "is not known (at least 3, from 8 sampled steps): sample more" in sentence(
        NoiseScale(32, None, 3.0, None, 8)
    )


def test_only_steps_that_tell_count() -> None:
    later = run_of(1.0, 200.0)
    alone = scale_of(later)
    changed = [record | {"gradient_norm": 1e3, "norm": 2e3} if record["step"] < 30 else record for record in later]
    assert scale_of(changed) == alone, "the first half of the run"
    assert (
        scale_of([record | {"norm": float("nan")} if record["event"] == EVENT else record for record in later]) is None
    )
    assert scale_of([record | {"optimizer": "discriminator"} for record in later]) is None, "several losses"
    assert scale_of([record | {"samples": BATCH} for record in later]) is None, "one microbatch is the batch"
    assert scale_of(run_of(1.0, 200.0, steps=14)) is None, "7 in the second half"
    again = [record | {"gradient_norm": 9.0, "norm": 9.0} for record in later]
    assert scale_of(again + later) == alone, "steps after a return to a checkpoint"


def test_it_is_the_last_line_of_why() -> None:
    findings = find(run_of(1.0, 200.0))
    assert "gradient noise scale is about" in sentences(findings)[-1]
    assert json.loads(json.dumps(findings.data()))["noise"]["batch"] == BATCH
    assert "noise" not in sentences(find([one for one in run_of(1.0, 200.0) if one["event"] == "step"]))[-1]


SCRIPT = """
import os
from functools import partial
import torch
import paceline
from subjects import tell

def forward(model, data):
    losses = torch.nn.functional.mse_loss(model(data[0]), data[1], reduction="none")
    return losses.sum(), losses.numel()

torch.manual_seed(0)
alike = os.environ["ALIKE"] == "yes"
inputs = torch.randn(1, 3).expand(64, 3).clone() if alike else torch.randn(64, 3)
whole = {"forward": lambda model, data: model(data[0]), "batch_loss": lambda outputs, batch: outputs.square().mean()}
session = paceline.start(
    **{
        "model": torch.nn.Linear(3, 2), "optimizer": partial(torch.optim.SGD, lr=0.1), "forward": forward,
        **{"batch_loss": whole, "closure": {"optimizer": torch.optim.LBFGS}}.get(os.environ.get("OTHER"), {}),
    },
    data=torch.utils.data.TensorDataset(inputs, inputs[:, :2].clone()), batch=16, exact=True, audit=1,
    strategy=os.environ["STRATEGY"], autocast=os.environ.get("AUTOCAST"), timeout_seconds=60,
)
for batch in session.batches(steps=5):
    session.step(batch)
tell(rank=session.rank)
"""


def events_of(printed: Printed, folder: Path, strategy: str, workers: int, **more: str) -> list[dict[str, Any]]:
    environment = {"STRATEGY": strategy, "ALIKE": "no", "PACELINE_RUN": str(folder)} | more
    printed(SCRIPT, workers, folder, environment=environment)
    paths = (folder / "events").glob("rank-*.jsonl")
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def recorded(printed: Printed, folder: Path, strategy: str, workers: int, **more: str) -> Any:
    """The norms of microbatches by step, and those of the batches."""
    records = events_of(printed, folder, strategy, workers, **more)
    small = [record for record in records if record["event"] == EVENT]
    large = {record["step"]: record["gradient_norm"] for record in records if record["event"] == "step"}
    names = ("microbatch", "samples", "batch", "norm")
    found = {(record["step"], *(record[name] for name in names)) for record in small}
    assert sorted(step for step, *_ in found) == [0, 1, 2, 3, 4], "with stealing two workers may compute the same"
    assert strategy == "stealing" or len(small) == len(found)
    return {step: values for step, *values in found}, large


@pytest.mark.parametrize("autocast", [None, "float16"])
def test_samples_that_are_alike_make_no_noise(printed: Printed, tmp_path: Path, autocast: str | None) -> None:
    """The gradient of a microbatch is then that of the batch, whatever divides the loss, or scales it."""
    more = {} if autocast is None else {"AUTOCAST": autocast}
    small, large = recorded(printed, tmp_path, "single", 1, ALIKE="yes", **more)
    for step, (_, samples, batch, norm) in small.items():
        assert (samples, batch) == (2, 16)
        assert norm == pytest.approx(large[step], rel=1e-5 if autocast is None else 1e-2)


@pytest.mark.parametrize("other", ["batch_loss", "closure"])
def test_steps_whose_gradient_is_no_mean_over_microbatches(printed: Printed, tmp_path: Path, other: str) -> None:
    found = {record["event"] for record in events_of(printed, tmp_path, "single", 1, OTHER=other)}
    assert "audit" in found and EVENT not in found


@pytest.mark.slow
def test_replicas_with_gradients_of_their_own(printed: Printed, tmp_path: Path) -> None:
    found = {record["event"] for record in events_of(printed, tmp_path, "local-sgd", 2)}
    assert "audit" in found and EVENT not in found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "sharded", "stealing"])
def test_any_number_of_workers_records_the_same(printed: Printed, tmp_path: Path, strategy: str) -> None:
    alone, norms_alone = recorded(printed, tmp_path / "one", "single", 1)
    small, large = recorded(printed, tmp_path / "three", strategy, 3)
    assert small == alone
    assert large == pytest.approx(norms_alone, rel=1e-6)  # sharded rounds it differently
