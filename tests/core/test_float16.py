"""A forward pass in float16: the loss is scaled, and what overflows is left out on all workers alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

HEAD = """
import os
from functools import partial
import torch
from torch.nn import functional
import paceline
from subjects import classes, mlp, tell

def loss(output, target):
    return 3200 * functional.cross_entropy(output, target)  # too large for the first scale

def start(**more):
    given = {"model": mlp(), "data": classes(256), "batch": 64, "loss": loss, "exact": True, "timeout_seconds": 60}
    given |= {"optimizer": partial(torch.optim.SGD, lr=0.002, momentum=0.9), "autocast": "float16", "clip_norm": 50.0}
    return paceline.start(**given | more)

def train(session, steps=16):
    return [session.step(batch) for batch in session.batches(steps=steps)]
"""

BITS = (
    HEAD
    + """
saves = {"checkpoint": {"directory": os.environ["SAVED"]}}
session = start(**saves)
reports = train(session, 12)
session.save()
scale = session._context.strategy_state["loss scale"]
reports += train(session, 4)
again = start(**saves, resume="auto")
train(again)
found = [session.fingerprint(), again.fingerprint()]
if session.workers > 1:
    other = start(strategy="stealing")
    train(other)
    found.append(other.fingerprint())
first = [report.applied for report in reports].index(True)
whole = train(start(autocast=None, optimizer=partial(torch.optim.SGD, lr=0.0)), first + 1)
tell(
    found=found,
    applied=[report.applied for report in reports],
    scale=scale,
    first=[(reports[first].loss, whole[-1].loss), (reports[first].gradient_norm, whole[-1].gradient_norm)],
)
"""
)


def test_one_hash_and_the_same_updates_on_all(printed: Printed, tmp_path: Path) -> None:
    told = []
    for workers in (1, 2, 3):
        (tmp_path / str(workers)).mkdir()
        saved = {"SAVED": str(tmp_path / str(workers) / "saved")}
        told += printed(BITS, workers, tmp_path / str(workers), environment=saved)
    assert len({one for each in told for one in each["found"]}) == 1
    assert all(one["applied"] == told[0]["applied"] and one["scale"] == told[0]["scale"] for one in told)
    applied = told[0]["applied"][:12]
    assert not applied[0] and any(applied)
    good = applied[::-1].index(False)
    assert told[0]["scale"] == [65536 / 2 ** applied.count(False), good]
    for found, whole in told[0]["first"]:
        assert found == pytest.approx(whole, rel=1e-2)


REFUSED = (
    HEAD
    + """
def said(**more):
    try:
        start(exact=False, **more)
    except paceline.ConfigError as error:
        return str(error)

strategies = "pipeline", "parameter-server", "hogwild", "backup", "local-sgd"
tell(**{name: said(strategy=name) for name in strategies}, LBFGS=said(optimizer=torch.optim.LBFGS))
"""
)


def test_strategies_that_cannot_scale_refuse(printed: Printed, tmp_path: Path) -> None:
    (told,) = printed(REFUSED, 1, tmp_path)
    for name, text in told.items():
        assert name in text and "float16" in text, (name, text)
