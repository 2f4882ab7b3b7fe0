"""Sparse gradients of embeddings on several workers: one fingerprint, the rows alone on the wire, clear refusals."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Run

from paceline.testing import faults

Printed = Callable[..., list[dict[str, Any]]]

MODEL = """
import json, os
import torch
import paceline
from functools import partial
from torch import nn

class Net(nn.Module):
    def __init__(self, sparse=True, rows=300):
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(rows, 8, sparse=sparse, mode="sum")
        self.words, self.top = nn.Embedding(20, 8, sparse=sparse), nn.Linear(24, 1)
        self.blocks = paceline.SparseEmbedding(300, 8, block=70)

    def forward(self, words):
        others = words + 7 * torch.arange(6, device=words.device)
        rows = self.bag(words), self.words(words[:, 0] % 20), self.blocks(others).sum(1)
        return self.top(torch.cat(rows, 1)).squeeze(1)

class RowAdagrad(torch.optim.Optimizer):
    "Adagrad with one sum for each row, of shape [rows] or [rows, 1]."

    def __init__(self, params, *rest):
        super().__init__(params, {"lr": 0.01, "rest": rest})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None and value.grad._nnz():
                    if not self.state[value]:
                        self.state[value] = {"sum": value.new_zeros(len(value), *group["rest"])}
                    rows, values = value.grad.coalesce().indices()[0], value.grad.coalesce().values()
                    sums = self.state[value]["sum"].view(-1, 1)
                    sums[rows] += values.square().mean(1, keepdim=True)
                    value[rows] -= group["lr"] * values / (sums[rows].sqrt() + 1e-10)

def two(model):
    rows = {"words": RowAdagrad(model.words.parameters(), 1), "blocks": RowAdagrad(model.blocks.parameters())}
    bag = torch.optim.SparseAdam(model.bag.parameters(), lr=0.01)
    return {"bag": bag, "top": torch.optim.Adam(model.top.parameters(), lr=0.01), **rows}

words = torch.randint(0, 17, (84, 6), generator=torch.Generator().manual_seed(1)) ** 2  # some words are in most samples
DATA = torch.utils.data.TensorDataset(words, words.float().mean(1) / 100)
SGD, ADAGRAD = partial(torch.optim.SGD, lr=0.05), partial(torch.optim.Adagrad, lr=0.1)
"""
SCRIPT = (
    MODEL
    + """
from subjects import tell

def trained(optimizer, exact, **more):
    session = paceline.start(model=Net(), data=DATA, optimizer=optimizer, loss=nn.functional.mse_loss, exact=exact,
                             batch=24, microbatches=6, clip_norm=0.3, **more)
    steps = [session.step(batch) for batch in session.batches(epochs=2)]  # the fourth batch has 12 samples
    return [session.fingerprint() if exact else "", [(one.loss, one.gradient_norm) for one in steps]]

class Table(nn.Embedding):
    def forward(self, words):
        return super().forward(words).mean((1, 2))

def trained_alone(exact, **more):
    torch.manual_seed(0)
    session = paceline.start(model=Table(300, 4, sparse=True), data=DATA, optimizer=SGD, loss=nn.functional.mse_loss,
                             exact=exact, batch=24, microbatches=6, **more)
    steps = [session.step(batch) for batch in session.batches(epochs=1)]
    return [session.fingerprint() if exact else "", [(one.loss, one.gradient_norm) for one in steps]]

tell(**{f"no dense parameter, {exact}": trained_alone(exact) for exact in (True, False)})
for name, optimizer in (("sgd", SGD), ("adagrad", ADAGRAD), ("two", two)):
    tell(**{f"{name}, {exact}": trained(optimizer, exact) for exact in (True, False)})
more = {"strategy": "sharded", **json.loads(os.environ["MORE"])}
ways = {
    "two": lambda: trained(two, True, **more),
    "sgd": lambda: trained(SGD, True, **more),
    "adagrad": lambda: trained(ADAGRAD, True, **more),
    "no dense parameter": lambda: trained_alone(True, **more)[:1],
}
tell(**{f"sharded, {name}, True": ways[name]() for name in os.environ["SHARDED"].split(";") if name})
"""
)


@pytest.fixture(scope="module")
def alone(printed: Printed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (one,) = printed(SCRIPT, 1, tmp_path_factory.mktemp("alone"), environment={"MORE": "{}", "SHARDED": ""})
    return one


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("machines", "more"),
    [
        ([4], {}),
        pytest.param([1, 2], {}, marks=SLOW),
        pytest.param([3], {"shard": "gradients"}, marks=SLOW),
        pytest.param([5], {"shard_copy": True}, marks=SLOW),
        pytest.param([1, 1], {"strategy": "parameter-server", "server": {"count": 1}}, marks=SLOW),
        pytest.param([1, 2], {"strategy": "parameter-server", "server": {"count": 2, "dedicated": True}}, marks=SLOW),
    ],
    ids=str,
)
def test_one_fingerprint(
    printed: Printed, tmp_path: Path, alone: dict[str, Any], machines: list[int], more: dict[str, Any]
) -> None:
    """Of four workers one has no microbatch of a short batch. Without ``exact`` losses are equal up to rounding."""
    names = ("two", "sgd", "adagrad", "no dense parameter") if more or len(machines) > 1 else ("two",)
    environment = {"MORE": json.dumps(more), "SHARDED": ";".join(names)}
    for one in printed(SCRIPT, sum(machines), tmp_path, machines=machines, environment=environment):
        for name, (fingerprint, steps) in alone.items():
            if name.endswith("True"):
                assert one[name] == [fingerprint, steps], name
            for loss, before in zip(one[name][1], steps, strict=True):
                assert loss == pytest.approx(before, rel=1e-5), name
        for name in names:  # without clipping, norms are rounded
            found = one[f"sharded, {name}, True"]
            assert found == alone[f"{name}, True"][: len(found)], name


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_fingerprint_on_one_gpu(printed: Printed, tmp_path: Path) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    environment |= {"MORE": "{}", "SHARDED": "two"}
    (single,) = printed(SCRIPT, 1, tmp_path / "1", environment=environment, deadline=300)
    for one in printed(SCRIPT, 3, tmp_path / "3", environment=environment, deadline=300):
        for name in single:
            assert not name.endswith("True") or one[name] == single[name], name


BYTES = (
    MODEL
    + """
from paceline.comm import world
from paceline.comm.servers import rpc
from subjects import tell

sent, transfers = [0], world.World.start_transfers
def counted(self, sends, receives, *more, **named):
    sent[0] += sum(one.tensor.nbytes for one in sends)
    return transfers(self, sends, receives, *more, **named)
world.World.start_transfers = counted
send = rpc._send
def counted_send(write, words, parts):
    sent[0] += sum(memoryview(part).nbytes for part in parts)
    send(write, words, parts)
rpc._send = counted_send
found = {}
for sparse, strategy in ((False, "allreduce"), (True, "allreduce"), (True, "sharded")):
    model = Net(sparse, rows=20_000)
    session = paceline.start(model=model, data=DATA, optimizer=SGD, loss=nn.functional.mse_loss,
                             exact=True, batch=24, microbatches=6, strategy=strategy)
    before = sent[0]
    for batch in session.batches(steps=3):
        session.step(batch)
    found[f"{sparse}, {strategy}"] = (sent[0] - before) / 3
    if strategy == "sharded":
        weights = session._loop.strategy._weights
        found["rows without a private mapping"] = weights._kept.nbytes - weights._seen.nbytes
    found[f"table of {sparse}, {strategy}"] = session.fingerprint(), model.blocks.blocks[0].untyped_storage().nbytes()
tell(**found)
"""
)


def test_the_rows_alone_are_sent(printed: Printed, tmp_path: Path) -> None:
    """Of a batch of 24 samples: at most 3 x 17 rows a node, with an index each, to one other worker.

    If the rows have owners, about half of them, and the rows that the owner has updated. If the machines divide a
    table, a machine has no memory for the rows of the other one, and each row that it needs comes from there.
    """
    everyone = printed(BYTES, 2, tmp_path, one_machine=False)
    assert sum(one["rows without a private mapping"] for one in everyone) == 300 * 8 * 4
    for one in everyone:
        assert one["False, allreduce"] > 20_000 * 8 * 4
        for strategy in ("allreduce", "sharded"):
            assert one[f"True, {strategy}"] < 3 * 3 * 17 * (8 * 4 + 4) + 8_000  # and headers, counts, digests, a layer
        fingerprint, size = one["table of True, allreduce"]
        assert size == 70 * 8 * 4
        assert one["table of True, sharded"] == [fingerprint, 4]


REFUSED = {
    "a format": ("Net()", "SGD", "exact=False, wire='int8'", ["'bag' gives sparse gradients", "wire = 'float32'"]),
    "fixed point": ("Net()", "SGD", "exact='fixed-point'", ["'bag' gives sparse gradients", "no exact = 'fixed"]),
    "stealing": ("Net()", "SGD", "strategy='stealing'", ["'bag' gives sparse gradients", "strategy 'allreduce'"]),
    "also dense": ("Tied()", "SGD", "", ["'bag.weight'", "gets a dense gradient", "sparse=False"]),
}
REFUSALS = (
    MODEL
    + """
class Tied(Net):
    def forward(self, words):
        return super().forward(words) + self.bag.weight.sum()

session = paceline.start(model=MODEL, data=DATA, optimizer=OPTIMIZER, loss=nn.functional.mse_loss, batch=24, MORE)
for batch in session.batches(steps=3):
    session.step(batch)
"""
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_averaged_is_refused(ranks: Any, tmp_path: Path, what: str) -> None:
    model, optimizer, more, words = REFUSED[what]
    script = REFUSALS.replace("MODEL", model).replace("OPTIMIZER", optimizer).replace("MORE", more)
    for one in ranks(script, 2, tmp_path):
        assert one.code != 0 and all(word in one.err for word in words), one.err


KILLED = (
    MODEL
    + """
import scripted
session = scripted.begin(model=Net(), data=DATA, optimizer=two, loss=nn.functional.mse_loss, exact=True, batch=24,
                         microbatches=6, schedule=None)
for batch in session.batches(steps=8):
    scripted.say(session, session.step(batch))
scripted.end(session)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "sharded", "parameter-server"])
def test_a_worker_is_killed_and_replaced(run: Run, printed: Printed, tmp_path: Path, strategy: str) -> None:
    (single,) = printed(KILLED, 1, tmp_path / "single")
    elastic = "-n", 3, "--elastic", "2:3", "--standby", 1, "--set", f"strategy={strategy}", "--set", "server.count=2"
    saves = '{"checkpoint": {"every": 6}}'
    ran = run(KILLED, *elastic, faults=faults.kill(rank=1, step=4), GIVEN=saves)
    assert ran.code == 0 and len(ran.printed()) == 3, ran.report()
    assert {one["fingerprint"] for one in ran.printed()} == {single["fingerprint"]}, ran.report()
    resumed = run(KILLED, "-n", 2, "--resume", "auto", *elastic[-4:], name="one", GIVEN=saves)
    assert resumed.code == 0 and len(resumed.printed()) == 3 + 2, resumed.report()
    assert {one["fingerprint"] for one in resumed.printed()} == {single["fingerprint"]}, resumed.report()
