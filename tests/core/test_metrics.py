"""Metrics that a forward pass returns beside the loss: the same means with every strategy, on any number of workers."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

HEAD = """
import json, os
from functools import partial
import torch
from torch.nn import functional
import paceline
from subjects import classes, mlp, tell

def loss(output, target):
    hit = output.argmax(1) == target
    positive = target == 1
    found = {
        "recall": (hit[positive].sum(), positive.sum()),
        "accuracy": hit.float().mean(),
        "largest": output.max().item(),
        "never": (0, 0),
    }
    return functional.cross_entropy(output, target), found

def train(lr=0.1, steps=5, **given):
    session = paceline.start(**{
        "model": mlp(), "optimizer": partial(torch.optim.SGD, lr=lr), "loss": loss, "data": classes(90), "batch": 40,
        "microbatches": 8,
    } | given)
    found = []
    for batch in session.batches(steps=steps):
        report = session.step(batch)
        found.append({name: value.hex() for name, value in report.metrics.items()} | {"loss": report.loss.hex()})
    return {"metrics": found, "fingerprint": session.fingerprint()}
"""

EXACT = [
    {"exact": True},
    {"exact": True, "strategy": "stealing"},
    {"exact": True, "strategy": "parameter-server", "server": {"mode": "sync"}},
    {"exact": True, "strategy": "pipeline"},
]
NEAR = [
    {},
    {"reduction": "collective"},
    {"strategy": "backup", "backup": {"workers": 0}},
    {"strategy": "pipeline"},
    {"strategy": "local-sgd", "local": {"every": 1}, "lr": 0.0},
]
SOMETIMES = [
    {"strategy": "parameter-server", "server": {"mode": "async"}, "lr": 0.0},
    {"strategy": "parameter-server", "server": {"mode": "bounded", "dedicated": True}, "lr": 0.0},
    {"strategy": "hogwild", "lr": 0.0},
    {"strategy": "pipeline", "pipeline": {"schedule": "pipedream"}, "lr": 0.0},
]
ALL = HEAD + "tell(**{str(place): train(**given) for place, given in enumerate(json.loads(os.environ['GIVEN']))})"


def numbers(step: dict[str, str]) -> dict[str, float]:
    return {name: float.fromhex(value) for name, value in step.items()}


@pytest.fixture(scope="module")
def alone(printed: Printed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """In one process: exact, then otherwise, then without updates."""
    given = json.dumps([{"exact": True}, {}, {"lr": 0.0}])
    (one,) = printed(ALL, 1, tmp_path_factory.mktemp("alone"), environment={"GIVEN": given})
    return one


def test_the_means_are_those_of_the_whole_batch(alone: dict[str, Any]) -> None:
    for found in alone.values():
        for step in map(numbers, found["metrics"]):
            assert list(step) == ["accuracy", "largest", "never", "recall", "loss"]
            assert 0.0 <= step["accuracy"] <= 1.0 and 0.0 <= step["recall"] <= 1.0
            assert math.isnan(step["never"])
    # the last batch of an epoch has 10 samples; the first has 40, of which each counts alike
    assert numbers(alone["2"]["metrics"][0])["accuracy"] * 40 == pytest.approx(
        round(numbers(alone["2"]["metrics"][0])["accuracy"] * 40)
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("machines", [(3,), (1, 2)], ids=["memory", "network"])
def test_every_strategy_gives_the_same_means(
    printed: Printed, tmp_path: Path, alone: dict[str, Any], machines: tuple[int, ...]
) -> None:
    given = EXACT + NEAR + [one for one in SOMETIMES if one["strategy"] != "hogwild" or len(machines) == 1]
    if len(machines) > 1:
        given = [one for one in given if "dedicated" not in one.get("server", {})]
    everyone = printed(ALL, 3, tmp_path, machines=machines, environment={"GIVEN": json.dumps(given)})
    for place, one in enumerate(given):
        for worker in everyone:
            check(one, worker[str(place)], alone)


def check(given: dict[str, Any], found: dict[str, Any], alone: dict[str, Any]) -> None:
    if given in EXACT:
        assert found == alone["0"], given
        return
    wanted = [numbers(step) for step in alone["2" if "lr" in given else "1"]["metrics"]]
    for place, step in enumerate(map(numbers, found["metrics"])):
        if given in NEAR:
            assert is_near(step, wanted[place]), (given, step)
        elif math.isnan(step["loss"]):  # nothing is known yet
            assert len(step) == 1
        elif given["strategy"] == "pipeline":  # of the microbatches that came back
            assert step.keys() == wanted[0].keys()
        else:
            assert any(is_near(step, known) for known in wanted), (given, step)


def is_near(left: dict[str, float], right: dict[str, float]) -> bool:
    return bool(left == pytest.approx(right, rel=1e-4, abs=1e-6, nan_ok=True))


NAMES = """
def loss_of_rank(output, target):
    value = functional.cross_entropy(output, target)
    return value, {"accuracy": value, "hits": value} if RANK else {"accuracy": value}
try:
    train(loss=loss_of_rank, strategy=os.environ["STRATEGY"], local={"every": 1})
except paceline.InputError as error:
    tell(error=str(error))
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd"])
def test_workers_with_other_names_are_refused(printed: Printed, tmp_path: Path, strategy: str) -> None:
    script = HEAD.replace("def loss", "RANK = int(os.environ['RANK'])\n\ndef loss", 1) + NAMES
    for one in printed(script, 2, tmp_path, environment={"STRATEGY": strategy}):
        assert "different metrics: 'accuracy' on rank 0, 'accuracy', 'hits' on rank 1" in one["error"]
