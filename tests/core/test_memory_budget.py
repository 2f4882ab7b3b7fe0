"""A budget of memory: what is recomputed to keep it changes no bit, and what cannot keep it ends before a step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import Run

Printed = Callable[..., list[dict[str, Any]]]

SCRIPT = """
import gc, json, os
from functools import partial
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
import paceline
from subjects import classes, tell

gc.disable()

class Peak(TorchDispatchMode):
    # the most bytes of tensors that operations have made and that live at one time
    def __init__(self):
        super().__init__()
        self.live, self.bytes, self.most = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                storage = StorageWeakRef(leaf.untyped_storage())
                self.bytes += leaf.untyped_storage().nbytes() - self.live.get(storage, 0)
                self.live[storage] = leaf.untyped_storage().nbytes()
        if self.bytes > self.most:  # may be less: some may have been freed
            self.live = {one: size for one, size in self.live.items() if not one.expired()}
            self.bytes = sum(self.live.values())
            self.most = max(self.most, self.bytes)
        return made

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        wide = 4 * width
        self.layers = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Dropout(0.1), nn.Linear(wide, width))

    def forward(self, values):
        return values + self.layers(self.norm(values))

def train(**more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), *(Block(16) for _ in range(5)), nn.Linear(16, 4))
    session = paceline.start(model=model, optimizer=partial(torch.optim.AdamW, lr=1e-2), data=classes(2048), batch=1024,
                             loss=nn.functional.cross_entropy, exact=True, timeout_seconds=30, **more)
    peaks = []
    for batch in session.batches(steps=3):
        peak = Peak()
        with peak:
            session.step(batch)
        peaks.append(peak.most)
    calls = [name for name, module in model.named_modules() if "forward" in vars(module)]
    stages = getattr(session._loop.strategy, "stages", None)
    again = [stage.recompute for stage in stages.local.values()] if stages else []
    return {"fingerprint": session.fingerprint(), "peak": max(peaks[1:]), "recomputed": calls, "stages": again}

tell(runs=[train(**more) for more in json.loads(os.environ["GIVEN"])])
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("strategy", "gigabytes"), [("sharded", 0.0006), ("allreduce", 0.0007)])
def test_what_is_recomputed_changes_no_bit(printed: Printed, tmp_path: Path, strategy: str, gigabytes: float) -> None:
    auto = {"strategy": strategy, "recompute": "auto"}
    given = [{"strategy": strategy}, auto | {"memory_gigabytes": gigabytes}, auto | {"memory_gigabytes": 1.0}]
    first, second = printed(SCRIPT, 2, tmp_path, environment={"GIVEN": json.dumps(given)})
    for plain, small, large in (first["runs"], second["runs"]):
        assert small["fingerprint"] == large["fingerprint"] == plain["fingerprint"]
        assert plain["recomputed"] == large["recomputed"] == []
        assert 0 < len(small["recomputed"]) < 5
        assert small["peak"] < 0.85 * plain["peak"]
    assert first["runs"][1]["recomputed"] == second["runs"][1]["recomputed"]


@pytest.mark.slow
def test_stages_are_recomputed_if_they_do_not_fit_otherwise(printed: Printed, tmp_path: Path) -> None:
    cut = {"strategy": "pipeline", "pipeline": {"cut": ["4"]}}
    given = [cut, *(cut | {"recompute": "auto", "memory_gigabytes": one} for one in (1.0, 0.0006))]
    first, last = printed(SCRIPT, 2, tmp_path, environment={"GIVEN": json.dumps(given)})
    for runs in (first["runs"], last["runs"]):
        assert len({run["fingerprint"] for run in runs}) == 1
        assert [run["stages"] for run in runs] == [[False], [False], [True]]
    plain, _, small = first["runs"]  # the last stage has one microbatch at a time in either case
    assert small["peak"] < 0.8 * plain["peak"]


RUN = """
from functools import partial
import torch, paceline
from torch import nn
from torch.utils.data import TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 8), torch.randn(512, 8))
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(4)))
session = paceline.start(model=model, optimizer=torch.optim.AdamW, loss=nn.functional.mse_loss, data=data, batch=256,
                         microbatches=4, recompute="auto", memory_gigabytes=0.0001)
for batch in session.batches(steps=4):
    session.step(batch)
"""


def test_the_run_tells_what_it_recomputes_and_what_it_reached(run: Run) -> None:
    ended = run(RUN, "-n", 2)
    assert ended.code == 0, ended.said
    lines = [json.loads(line) for line in (ended.run / "events/rank-0.jsonl").read_text().splitlines()]
    chosen, reached = (one for one in lines if one["event"] == "memory")
    assert 0 < len(chosen["recomputed"]) < 4
    assert chosen["predicted"] <= chosen["limit"] == 100_000
    assert reached["reached"] > 0
    notes = [one["text"] for one in lines if one["event"] == "note" and one["text"].startswith("memory: ")]
    assert f"{chosen['predicted']:,} of 100,000 bytes predicted (weights " in notes[0]
    assert f"{len(chosen['recomputed'])} of 4 blocks are recomputed (" in notes[0]
    assert "this worker has grown by" in notes[1]
