"""Optimizers as scripts use them: one hash on any number of workers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

HEAD = """
import os
from functools import partial
import torch
from torch import nn
from torch.nn import functional
import paceline
from subjects import classes, mlp, tell

def train(steps, **more):
    given = {"model": mlp(), "data": classes(256), "batch": 64, "exact": True, "timeout_seconds": 30}
    session = paceline.start(**given | more)
    for batch in session.batches(steps=steps):
        report = session.step(batch)
    return session, report

def hash_of(steps=4, **more):
    return train(steps, **more)[0].fingerprint()
"""

SEVERAL = (
    HEAD
    + """
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

def muon_and_adamw(named_parameters):
    matrices = [pair for pair in named_parameters if pair[1].ndim == 2]
    rest = [pair for pair in named_parameters if pair[1].ndim != 2]
    return {"muon": torch.optim.Muon(matrices, lr=0.02), "adamw": torch.optim.AdamW(rest, lr=1e-2)}

given = {
    "optimizer": muon_and_adamw,
    "schedule": {"muon": partial(StepLR, step_size=3), "adamw": partial(CosineAnnealingLR, T_max=10)},
    "loss": functional.cross_entropy,
    "clip_norm": 1.0,
}
found = {}
for strategy in STRATEGIES:
    found[strategy] = hash_of(strategy=strategy, **given)
saved = {"checkpoint": {"directory": os.environ["SAVED"]}}
session, _ = train(2, **given | saved)
session.save()
again = paceline.start(
    **given, **saved, model=mlp(), data=classes(256), batch=64, exact=True, resume="auto"
)
for batch in again.batches(steps=4):
    again.step(batch)
found["resumed"] = again.fingerprint()
names = [group["param_names"] for group in again._context.update.optimizer.param_groups]
tell(found=found, names=names)
"""
)


def test_muon_for_matrices_and_adamw_for_the_rest(printed: Printed, tmp_path: Path) -> None:
    hashes = set()
    for workers, one_machine, strategies in (
        (1, True, ["allreduce"]),
        (2, True, ["allreduce", "stealing", "parameter-server", "pipeline"]),
        (3, False, ["allreduce", "parameter-server"]),
    ):
        directory = tmp_path / str(workers)
        directory.mkdir()
        script = SEVERAL.replace("STRATEGIES", repr(strategies))
        saved = {"SAVED": str(directory / "saved")}
        told = printed(script, workers, directory, one_machine=one_machine, environment=saved)
        hashes |= {value for one in told for value in one["found"].values()}
        assert told[0]["names"] == [["0.weight", "2.weight"], ["0.bias", "2.bias"]]
    assert len(hashes) == 1


PENALTY = (
    HEAD
    + """
def penalized(model, microbatch):
    inputs, targets = microbatch
    inputs = inputs.clone().requires_grad_()
    output = model(inputs)
    (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    return functional.cross_entropy(output, targets) + 0.1 * slope.square().sum(1).mean()

given = {"optimizer": partial(torch.optim.SGD, lr=0.1), "forward": penalized}
_, report = train(4, **given | {"exact": False})
tell(fingerprint=hash_of(**given), loss=report.loss)
"""
)


def test_gradients_within_the_forward_pass(printed: Printed, tmp_path: Path) -> None:
    told = [one for workers in (1, 3) for one in printed(PENALTY, workers, tmp_path)]
    assert len({one["fingerprint"] for one in told}) == 1
    assert all(one["loss"] == pytest.approx(told[0]["loss"], rel=1e-4) for one in told)
