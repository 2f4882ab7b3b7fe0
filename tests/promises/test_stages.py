"""Pipelines: the bits of one process with each schedule, and what a worker holds."""

from __future__ import annotations

from typing import Any

import pytest

SCRIPT = """
import os
from functools import partial
import torch
from torch import nn
from torch.nn import functional
import paceline
from pipeline_cases import Tied, of_tokens, tokens
from subjects import CASES, classes, images, measure_alike, tell

measure_alike()
workers = int(os.environ["WORLD_SIZE"])

def shared():
    '''One weight in six stages.'''
    torch.manual_seed(2)
    layers = nn.Sequential(*(nn.Linear(12, 12) if number % 2 == 0 else nn.Tanh() for number in range(11)))
    for number in range(2, 11, 2):
        layers[number].weight = layers[0].weight
    return layers

def train(case, microbatches=8, **pipeline):
    given = CASES["batch norm, dropout, short batch"]() | {"microbatches": microbatches, "clip_norm": 1.0}
    if case == "tied":
        torch.manual_seed(1)
        given |= {"model": Tied(), "data": tokens(70), "loss": of_tokens}
    if case == "shared":
        given |= {"model": shared(), "data": classes(70)}
    how = {"strategy": "pipeline", "pipeline": pipeline} if workers > 1 else {}
    session = paceline.start(**given | {"exact": True} | how)
    losses, held = [], 0
    for batch in session.batches(steps=5):
        report = session.step(batch)
        losses.append(report.loss.hex())
        if batch.step == 3:
            held = sum(value.untyped_storage().nbytes() for value in given["model"].parameters())
            try:
                given["model"].state_dict()
                refused = ""
            except paceline.InputError as error:
                refused = str(error)
    found = {"fingerprint": session.fingerprint(), "losses": losses, "norm": report.gradient_norm.hex()}
    if case == "convolutions":
        found["value"] = session.evaluate(images(40)).hex()
    whole = session.model_state()
    return {"result": found, "held": held, "whole": sum(value.numel() for value in whole.values()), "refused": refused}

if workers == 1:
    tell(convolutions=train("convolutions"), tied=train("tied"), shared=train("shared"))
else:
    for schedule in ("layerwise", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"):
        chunks = {"chunks": 2} if schedule == "interleaved" else {}
        tell(**{schedule: train("convolutions", schedule=schedule, **chunks)})
    cut = ["2", "4", "6", "8", "10"]
    tell(tied=train("tied"), shared=train("shared", schedule="interleaved", chunks=2, cut=cut))
    tell(replicas=train("convolutions", stages=2, replicas=[2, 1]))
"""


@pytest.fixture(scope="module")
def alone(reported: Any) -> dict[str, Any]:
    return reported(SCRIPT, 1)[0]


@pytest.fixture(scope="module")
def stages(reported: Any) -> list[dict[str, Any]]:
    """What each of three workers finds with each schedule."""
    return reported(SCRIPT, 3)


def check(stages: list[dict[str, Any]], alone: dict[str, Any], name: str, case: str = "convolutions") -> None:
    assert [one[name]["result"] for one in stages] == [alone[case]["result"]] * 3


@pytest.mark.promise(
    "docs/pipeline.md",
    "With `exact=True` the first six give the bits of one process, whatever the cut, the schedule, and the number of "
    "workers for each stage",
)
@pytest.mark.parametrize("schedule", ["layerwise", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_the_bits_of_each_schedule(stages: Any, alone: Any, schedule: str) -> None:
    check(stages, alone, schedule)


@pytest.mark.promise(
    "docs/cutting.md", "Their gradients are added from the last stage to the first: the same sum as in one process."
)
def test_the_bits_of_tied_weights(stages: Any, alone: Any) -> None:
    check(stages, alone, "tied", "tied")
    check(stages, alone, "shared", "shared")


@pytest.mark.promise(
    "docs/pipeline.md",
    "With more workers than stages several hold the same stage, each computes a share of the microbatches, and they "
    "average their gradients",
)
def test_the_bits_of_stages_with_several_workers(stages: Any, alone: Any) -> None:
    check(stages, alone, "replicas")


@pytest.mark.promise(
    "docs/pipeline.md",
    "While it trains, a worker has the parameters, gradients and optimizer state of its own stages only; parameters of "
    "other stages keep their shape but have no values.",
)
def test_a_worker_holds_its_stages_only(stages: Any, alone: Any) -> None:
    assert sum(one["1f1b"]["held"] for one in stages) == alone["convolutions"]["held"]
    assert all(0 < one["1f1b"]["held"] < alone["convolutions"]["held"] for one in stages)


@pytest.mark.promise("docs/weights.md", "It is complete with any strategy: a pipeline's worker has the values")
def test_all_weights_of_a_pipeline(stages: Any, alone: Any) -> None:
    assert {one["1f1b"]["whole"] for one in stages} == {alone["convolutions"]["whole"]}
    assert all("session.model_state()" in one["1f1b"]["refused"] for one in stages), stages
