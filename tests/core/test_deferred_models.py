"""A model that is built without memory trains with the bits of one that is built as usual."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

SCRIPT = """
from contextlib import nullcontext
from functools import partial
import torch
from torch import nn
from torch.nn import functional
import paceline
from subjects import classes, tell

def build():
    model = nn.Sequential(nn.Linear(12, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 64), nn.Linear(64, 4))
    nn.init.orthogonal_(model[3].weight)
    nn.init.trunc_normal_(model[0].weight, std=0.1)
    return model

def start(way, **settings):
    torch.manual_seed(0)
    with way():
        model = build()
    assert (model[0].weight.untyped_storage().nbytes() == 0) == (way is paceline.deferred)
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    given = dict(model=model, optimizer=adamw, loss=functional.cross_entropy, data=classes(200), batch=48, exact=True)
    session = paceline.start(**given | settings)
    for batch in session.batches(steps=3):
        session.step(batch)
    return session.fingerprint()

found = {strategy: [start(way, strategy=strategy) for way in (nullcontext, paceline.deferred)] for strategy in WHICH}
tell(found=found)
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_the_fingerprint_is_that_of_a_model_built_as_usual(workers: int, printed: Printed, tmp_path: Path) -> None:
    which = ["single"] if workers == 1 else ["allreduce", "sharded", "pipeline"]
    for one in printed(SCRIPT.replace("WHICH", repr(which)), workers, tmp_path):
        for plain, deferred in one["found"].values():
            assert plain == deferred
