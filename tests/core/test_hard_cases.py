"""Models and scripts that tempt workers to part ways: the same bits on any number of them, or a clear refusal."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bad_input import Bad, check_refusal, refusals

Printed = Callable[..., list[dict[str, Any]]]

HEAD = """
import torch
from functools import partial
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
import paceline
from subjects import tell

features = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(features, torch.arange(40) % 3)
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

def start(model=None, optimizer=sgd, loss=functional.cross_entropy, exact=True, **settings):
    torch.manual_seed(0)
    model = model() if model else nn.Linear(4, 3)
    return paceline.start(model=model, data=data, loss=loss, optimizer=optimizer, batch=16, exact=exact, **settings)

def trained(session, steps=6):
    for batch in session.batches(steps=steps):
        session.step(batch)
    return session.fingerprint()
"""

SAME = """
class Rebound(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("narrow", torch.zeros(3, dtype=torch.float16))
    def forward(self, x):
        y = self.layer(x)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        self.narrow.data.add_(1000)
        return y + self.average

class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for value in group["params"]:
                value.grad.add_(torch.randn_like(value), alpha=0.01)
        return super().step(closure)

class FromTheStart(torch.optim.SGD):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            for value in group["params"]:
                self.state[value]["start"] = value.detach().clone()
    def step(self, closure=None):
        for group in self.param_groups:
            for value in group["params"]:
                value.grad.add_(value.detach() - self.state[value]["start"], alpha=0.1)
        return super().step(closure)

class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 3)
    def forward(self, x):
        return self.one(x).relu() if x[0, 0] > 0 else self.one(x) + self.two(x).relu() * 0

class Watched(Rebound):
    def forward(self, x):
        y = self.layer(x)
        self.average.add_(y.detach().mean(0))
        return y

seen = []
def mixing(items):
    x, y = torch.utils.data.default_collate(items)
    seen.append(torch.rand(()).item())
    return x * seen[-1], y

found = {}
session = start(Rebound)
found["rebound buffer"] = trained(session)
assert session._context.compute.model.narrow.isfinite().all()
found["random optimizer"] = trained(start(optimizer=partial(Noisy, lr=0.1)))
found["optimizer with a state from the start"] = trained(start(optimizer=partial(FromTheStart, lr=0.1)))
found["sometimes unused"] = trained(start(Sometimes, missing_gradient="zero"))
session = start(Watched)
trained(session)
before = session.fingerprint()
session.evaluate(data, lambda output, target: output.mean())
assert session.fingerprint() == before
found["buffer changed by evaluation"] = trained(session)
found["random collate"] = trained(start(collate=mixing, audit="off"))
assert len(set(seen)) == len(seen)
found["frozen part"] = trained(start(lambda: nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3))))
found["channels last"] = trained(start(lambda: nn.Sequential(nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 8, 1),
    nn.Flatten(), nn.Linear(8, 3)).to(memory_format=torch.channels_last)))
normal = nn.utils.parametrizations.spectral_norm
def normed():
    twice = normal(nn.Linear(4, 4))
    return nn.Sequential(twice, nn.Tanh(), twice, normal(nn.Linear(4, 3)))
found["output that depends on a changed buffer"] = trained(start(normed))
again = trained(start(normed, recompute=["ParametrizedLinear"]))
assert again == found["output that depends on a changed buffer"]
tell(**found)
"""


@pytest.mark.slow
def test_the_bits_do_not_depend_on_the_workers(printed: Printed, tmp_path: Path) -> None:
    (alone,) = printed(HEAD + SAME, 1, tmp_path)
    for workers in (2, 4):
        for one in printed(HEAD + SAME, workers, tmp_path):
            assert one == alone


STATISTICS = """
session = start(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double(), microbatches=3)
order = paceline.data.order.Order(40, 16, 3, seed=0)
rows = features[[sample for part in order.microbatches_of(0) for sample in part]]
trained(session, 1)
norm = session._context.compute.model[0]
tell(found=norm.running_mean.tolist(), mean=(0.1 * rows.mean(0)).tolist(), counted=norm.num_batches_tracked.item())
"""


def test_statistics_are_means_over_samples(printed: Printed, tmp_path: Path) -> None:
    script = HEAD.replace("features = torch.randn(40, 4,", "features = torch.randn(40, 4, dtype=torch.float64,")
    for workers in (1, 3):
        for one in printed(script + "import paceline.data.order\n" + STATISTICS, workers, tmp_path):
            assert one["found"] == pytest.approx(one["mean"], rel=1e-12)
            assert one["counted"] == 1


CAUGHT = """
class Failing(nn.Linear):
    fails = False
    def forward(self, x):
        y = super().forward(x)
        if self.fails:
            y.register_hook(self.fail)
        return y
    def fail(self, gradient):
        raise MemoryError("no memory for this one")

session = start(lambda: Failing(4, 3))
model = session._context.compute.model
for batch in session.batches(steps=6):
    model.fails = batch.step == 2
    try:
        session.step(batch)
    except MemoryError:
        pass
tell(fingerprint=session.fingerprint())
"""


def test_a_step_that_failed_everywhere_leaves_no_trace(printed: Printed, tmp_path: Path) -> None:
    (alone,) = printed(HEAD + CAUGHT, 1, tmp_path)
    assert all(one == alone for one in printed(HEAD + CAUGHT, 2, tmp_path))


UNUSED_CALL = """
session = start()
session.batches(steps=2)
tell(steps=[session.step(batch).step for batch in session.batches(steps=2)])
"""


def test_a_call_that_nobody_went_through_does_not_count(printed: Printed, tmp_path: Path) -> None:
    (one,) = printed(HEAD + UNUSED_CALL, 1, tmp_path)
    assert one["steps"] == [0, 1]


CAUGHT_NAN = """
class Nan(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer, self.bad = nn.BatchNorm1d(4), nn.Linear(4, 3), False
    def forward(self, x):
        return self.layer(self.norm(x * float("nan") if self.bad else x))

session = start(Nan)
trained(session, 2)
session._context.compute.model.bad = True
before = session.fingerprint()
try:
    trained(session, 1)
except paceline.NonFiniteLoss:
    tell(same=session.fingerprint() == before)
"""


def test_a_loss_that_is_not_finite_leaves_the_state_as_it_was(printed: Printed, tmp_path: Path) -> None:
    for one in printed(HEAD + CAUGHT_NAN, 2, tmp_path):
        assert one["same"]


REFUSED = {
    "reentrant": Bad(
        """
class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return self.last(x)
trained(start(Shared))
""",
        "InputError",
        ["'layer.", "use_reentrant=False"],
    ),
    "foreign parameter": Bad(
        "extra = nn.Parameter(torch.ones(7))\ntrained(start(optimizer=lambda p: torch.optim.SGD([*p, extra], lr=0.1)))",
        "InputError",
        ["shape [7]", "not one of the model's"],
    ),
    "unfrozen": Bad(
        """
session = start(lambda: nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3)))
trained(session, 2)
session._context.compute.model.requires_grad_(True)
trained(session, 2)
""",
        "InputError",
        ["'0.weight'", "was frozen at the start"],
    ),
    "DataParallel": Bad(
        "start(lambda: nn.DataParallel(nn.Linear(4, 4)))",
        "InputError",
        ["model is wrapped in DataParallel", "give start the model inside it"],
    ),
    "SyncBatchNorm": Bad(
        "start(lambda: nn.SyncBatchNorm(4))",
        "InputError",
        ["is a SyncBatchNorm, which torch computes on GPUs only"],
    ),
    "meta": Bad(
        "start(lambda: nn.Linear(4, 3, device='meta'))", "InputError", ["'weight' of the model is on the meta device"]
    ),
    "lazy": Bad("start(lambda: nn.LazyLinear(3))", "InputError", ["'weight' has no shape yet"]),
    "all frozen": Bad("start(lambda: nn.Linear(4, 3).requires_grad_(False))", "InputError", ["nothing to train"]),
    "sparse": Bad(
        "start(lambda: nn.Sequential(nn.Embedding(4, 3, sparse=True)), strategy='stealing')",
        "InputError",
        ["'0' gives sparse gradients", "sparse=False"],
    ),
    "late buffer": Bad(
        """
class Late(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.counts = False
    def forward(self, x):
        if self.counts:
            self.calls += 1
        return super().forward(x)
session = start(Late)
trained(session, 2)
session._context.compute.model.counts = True
trained(session, 2)
""",
        "InputError",
        ["the buffer 'calls'", "did not change in the first step"],
    ),
    "not pairs": Bad(
        "start().evaluate([1.0, 2.0, 3.0], lambda output, target: 0.0)",
        "InputError",
        ["must give pairs (input, target)"],
    ),
}

SPARSE = """
class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(4, 3))
    def forward(self, x):
        return functional.embedding((x[:, 0] > 0).long(), self.rows, sparse=True)
trained(start(Rows, exact=False, optimizer=partial(torch.optim.SGD, lr=0.1), STRATEGY))
"""
ALONE = """
class Words(nn.Module):
    def __init__(self, sparse, call):
        super().__init__()
        self.sparse, self.call = sparse, call
        self.rows = nn.Embedding(9, 3, sparse=sparse)
    def forward(self, x):
        words = (x * 3).long().clamp(-4, 4) + 4
        if self.call:
            return functional.embedding(words, self.rows.weight, sparse=self.sparse).sum(1)
        return self.rows(words).sum(1)
def trained_with(sparse, call=False):
    given = dict(optimizer=partial(torch.optim.Adagrad, lr=0.1), clip_norm=0.2, exact=EXACT, strategy=STRATEGY)
    session = start(lambda: Words(sparse, call), **given)
    norms = [session.step(batch).gradient_norm for batch in session.batches(steps=6)]
    return norms, session._context.compute.model.rows.weight.tolist()
tell(dense=trained_with(False), module=trained_with(True), function=trained_with(True, call=True))
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("strategy", ["allreduce", "parameter-server", "pipeline"])
def test_one_process_takes_sparse_gradients(printed: Printed, tmp_path: Path, strategy: str, exact: bool) -> None:
    """From a module and from a function; microbatches and clipping do with them what they do with dense ones."""
    script = ALONE.replace("STRATEGY", repr(strategy)).replace("EXACT", repr(exact))
    (one,) = printed(HEAD + script, 1, tmp_path)
    assert max(one["dense"][0]) > 0.2
    assert one["module"] == one["function"]
    for sparse, dense in zip(one["module"], one["dense"], strict=True):
        assert torch.allclose(torch.tensor(sparse), torch.tensor(dense), rtol=1e-5, atol=1e-7)


@pytest.fixture(scope="module")
def refused(printed: Printed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return refusals(printed, HEAD, REFUSED, tmp_path_factory.mktemp("refused"))


@pytest.mark.promise(
    "docs/train.md", "The other strategies refuse them where there are several workers, or more may come"
)
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_trained_alike_is_refused(refused: dict[str, list[Any]], what: str) -> None:
    check_refusal(refused[what], REFUSED[what])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "how",
    [
        "strategy='allreduce'",
        "strategy='allreduce', microbatches=2",
        "strategy='stealing'",
        "strategy='backup', backup={'workers': 1}",
        "strategy='local-sgd'",
        "strategy='parameter-server'",
        "strategy='parameter-server', server={'mode': 'async'}",
        "strategy='parameter-server', server={'mode': 'async', 'dedicated': True}",
    ],
)
def test_sparse_gradients_are_refused(ranks: Any, tmp_path: Path, how: str) -> None:
    everyone = ranks(HEAD + SPARSE.replace("STRATEGY", how), 2, tmp_path)
    found = [one for one in everyone if "WorkerLost" not in one.err]
    assert found and all(one.code for one in everyone)
    for one in found:
        assert "The parameter 'rows' gets sparse gradients" in one.err and "sparse=False" in one.err
        assert "Traceback" not in one.err


PLACES = """
session = start()
if session.rank == 1:
    session.evaluate(data)
trained(session)
"""


def test_workers_at_different_places_are_named(ranks: Any, tmp_path: Path) -> None:
    everyone = ranks(HEAD + PLACES, 2, tmp_path)
    assert all(one.code != 0 for one in everyone)
    assert any(re.search(r"session\.step.* on rank 0 .*session\.evaluate.* on rank 1", one.err) for one in everyone), [
        one.err for one in everyone
    ]


QUANTIZED = """
from functools import partial
import torch
import torch.ao.quantization as quantization
from torch import nn
import paceline
from subjects import classes, mlp

model = mlp().train()
model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
model = quantization.prepare_qat(model)
session = paceline.start(
    model=model, optimizer=partial(torch.optim.SGD, lr=0.1), loss=nn.functional.cross_entropy, data=classes(96),
    batch=16, exact=True, timeout_seconds=30,
)
for batch in session.batches(steps=6):
    session.step(batch)
print('{"fingerprint": "%s"}' % session.fingerprint())
"""


def test_training_with_quantization_in_mind(printed: Printed, tmp_path: Path) -> None:
    """Its observers give their buffers a size when they are used first."""
    (alone,) = printed(QUANTIZED, 1, tmp_path / "one", deadline=60)
    assert printed(QUANTIZED, 2, tmp_path / "two", deadline=60) == [alone, alone]
