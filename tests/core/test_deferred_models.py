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


MEMORY = """
import os, re, threading
from contextlib import nullcontext
import torch
from torch import nn
import paceline
from subjects import tell

states = []
WIDTH, LAYERS, rank = 1024, 20, int(os.environ["RANK"])  # 84 MB
torch.manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(8, WIDTH), torch.randn(8, WIDTH))

def start(layers, differs=False, way=paceline.deferred):
    torch.manual_seed(0)
    with way():
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        if differs and rank:
            model[0].weight.data.mul_(1.0)
    session = paceline.start(model=model, optimizer=torch.optim.SGD, loss=nn.functional.mse_loss, data=data, batch=8,
                             strategy="sharded", timeout_seconds=30)
    states.append(torch.get_rng_state())
    return session

def own_bytes():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def weights(session):
    return [value.sum().item().hex() for value in session._context.compute.model.parameters()]

# a plain model, and records that differ between the workers, but not their values
small = [weights(start(1, way=nullcontext)), weights(start(1)), weights(start(1, differs=True))]
assert small[0] == small[1] == small[2]
assert all(torch.equal(state, states[0]) for state in states)
before, most, ended = own_bytes(), [0], threading.Event()

def watch():
    while not ended.wait(0.002):
        most.append(own_bytes() - before)

watcher = threading.Thread(target=watch)
watcher.start()
session = start(LAYERS)
ended.set()
watcher.join()
tell(most=max(most), weights=weights(session))
"""


def test_workers_that_share_the_weights_compute_them_into_shared_memory(printed: Printed, tmp_path: Path) -> None:
    first, second = printed(MEMORY, 2, tmp_path)
    assert first["weights"] == second["weights"]
    assert max(first["most"], second["most"]) < 48e6  # up to 32 MB of them are freed values, which the heap keeps
