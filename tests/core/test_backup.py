"""A step does not wait for the last workers: one set of contributions, nothing late applied, no sample lost."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.data.order import Order

Printed = Callable[..., list[dict[str, Any]]]
LENGTH, BATCH, PARTS = 90, 24, 12  # an epoch has 4 steps; the last batch has 18 samples, in 9 microbatches
ORDER = Order(LENGTH, BATCH, PARTS, seed=0)
WAYS = pytest.mark.parametrize("one_machine", [True, False], ids=["memory", "network"])

# Each sample has a weight of its own, and its gradient is 1: the weights tell which samples were used, and in updates
# of how many. LATE: the ranks that wait, at their first microbatch of a step, until the others have done enough.
SCRIPT = """
import json, os, sys, time
from functools import partial
import torch
from torch import nn
import paceline
from subjects import tell

late = json.loads(os.environ["LATE"])

def await_the_others():
    strategy = session._loop.strategy
    quorum = getattr(strategy, "_workers", strategy)._quorum
    until = time.monotonic() + 30
    while not quorum._enough():
        assert time.monotonic() < until
        time.sleep(0.002)

class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(90, dtype=torch.float64))
        self.norm = nn.BatchNorm1d(1, dtype=torch.float64)

def forward(model, microbatch):
    if session.rank in late:
        await_the_others()
    (places,) = microbatch
    model.norm(places.double().unsqueeze(1))
    return -model.weight[places].mean() + 0 * (model.norm.weight.sum() + model.norm.bias.sum())

given = {"strategy": "backup", "batch": 24, "microbatches": 12} | json.loads(os.environ.get("GIVEN", "{}"))
data = torch.utils.data.TensorDataset(torch.arange(90))
session = paceline.start(
    model=Weights(), data=data, forward=forward, optimizer=partial(torch.optim.SGD, lr=1.0), **given
)
left_out = json.loads(os.environ.get("LEFT_OUT", "[]"))
reports = []
for batch in session.batches(steps=int(os.environ.get("STEPS", 8))):
    if batch.step not in left_out:
        reports.append(session.step(batch))
model = session._context.compute.model
tell(
    fingerprint=session.fingerprint(), weights=model.weight.tolist(), mean=model.norm.running_mean.item(),
    position=session.position, applied=[report.applied for report in reports],
    notes=reports[-1].notes if reports else [], shared=session._context.world.shared_memory is not None,
)
"""


@pytest.fixture
def train(printed: Printed, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    def run(workers: int, *, late: list[int] | None = None, **more: Any) -> list[dict[str, Any]]:
        one_machine = more.pop("one_machine", True)
        environment = {"LATE": json.dumps(late or []), "PACELINE_RUN": str(tmp_path)}
        environment |= {name: str(more.pop(name)) for name in ("STEPS", "LEFT_OUT") if name in more}
        everyone = printed(
            SCRIPT,
            workers,
            tmp_path,
            one_machine=one_machine,
            environment=environment | {"GIVEN": json.dumps(more)},
        )
        assert len({one["fingerprint"] for one in everyone}) == 1
        assert {one["shared"] for one in everyone} == {one_machine and workers > 1}
        return everyone

    return run


def sets_of(folder: Path) -> list[dict[str, Any]]:
    """What was used and dropped in each step, on which all workers must agree."""
    told: dict[int, list[dict[str, Any]]] = {}
    for path in sorted((folder / "events").glob("rank-*.jsonl")):
        for event in map(json.loads, path.read_text().splitlines()):
            if event["event"] == "backup":
                told.setdefault(event["step"], []).append({key: event[key] for key in ("used", "dropped")})
    for step, sets in told.items():
        assert all(one == sets[0] for one in sets), f"step {step}: {sets}"
    return [told[step][0] for step in sorted(told)]


def samples_in(microbatches: list[list[int]]) -> list[int]:
    return [sample for step, number in microbatches for sample in ORDER.microbatches_of(step)[number]]


def used_in(one: dict[str, Any]) -> list[int]:
    return [sample for _, members in one["used"] for sample in samples_in(members)]


def weights_of(sets: list[dict[str, Any]]) -> list[float]:
    """What the weights must be if exactly these samples were used."""
    weights = [0.0] * LENGTH
    for one in sets:
        used = used_in(one)
        for sample in used:
            weights[sample] += 1 / len(used)
    return weights


def check_epochs(sets: list[dict[str, Any]]) -> None:
    """Each epoch used each sample exactly once."""
    for first in range(0, len(sets), ORDER.steps_per_epoch):
        used = [sample for one in sets[first : first + ORDER.steps_per_epoch] for sample in used_in(one)]
        assert Counter(used) == Counter(range(LENGTH))


@pytest.mark.sampled(1)
@WAYS
def test_late_workers_are_not_waited_for_and_no_sample_is_lost(train: Any, tmp_path: Path, one_machine: bool) -> None:
    everyone = train(3, late=[1], one_machine=one_machine)
    sets = sets_of(tmp_path)
    assert len(sets) == 8
    check_epochs(sets)
    assert everyone[0]["weights"] == pytest.approx(weights_of(sets), rel=1e-12, abs=0)
    for step, one in enumerate(sets):
        ranks = [rank for rank, _ in one["used"]]
        if step % 4 < 3:
            assert len(set(ranks)) == len(ranks) == 2 and len(one["dropped"]) == 1
    assert all(rank != 1 for one in sets for rank, _ in one["used"])


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2])
def test_servers_do_not_wait_for_late_workers_either(train: Any, tmp_path: Path, servers: int) -> None:
    given = {"strategy": "parameter-server", "backup": {"workers": 1}, "server": {"count": servers}}
    everyone = train(3, late=[1], **given)
    sets = sets_of(tmp_path)
    check_epochs(sets)
    assert everyone[0]["weights"] == pytest.approx(weights_of(sets), rel=1e-12, abs=0)
    assert all(rank != 1 for one in sets for rank, _ in one["used"])


def test_two_backup_workers(train: Any, tmp_path: Path) -> None:
    everyone = train(4, late=[1, 3], backup={"workers": 2})
    sets = sets_of(tmp_path)
    check_epochs(sets)
    assert everyone[0]["weights"] == pytest.approx(weights_of(sets), rel=1e-12, abs=0)
    assert {rank for one in sets for rank, _ in one["used"]} == {0, 2}


def test_statistics_are_means_over_the_samples_used(train: Any, tmp_path: Path) -> None:
    everyone = train(3, late=[1], STEPS=1)
    used = used_in(sets_of(tmp_path)[0])
    for one in everyone:
        assert one["mean"] == pytest.approx(0.1 * sum(used) / len(used), rel=1e-12)


@pytest.mark.slow
def test_a_run_goes_on_with_other_workers_and_owes_the_epoch_the_same(train: Any, tmp_path: Path) -> None:
    """The checkpoint is in the middle of an epoch; the worker that goes on alone uses what was too late."""
    keeping = {"directory": str(tmp_path / "kept"), "every": 6}
    train(3, late=[1], STEPS=6, checkpoint=keeping)
    (alone,) = train(1, STEPS=8, checkpoint=keeping, resume="auto")
    sets = sets_of(tmp_path)
    assert len(sets) == 8
    check_epochs(sets)
    assert alone["weights"] == pytest.approx(weights_of(sets), rel=1e-12, abs=0)


def test_a_batch_that_the_script_leaves_out_takes_its_samples_along(train: Any, tmp_path: Path) -> None:
    everyone = train(3, late=[1], LEFT_OUT=[1], STEPS=4)
    sets = sets_of(tmp_path)
    used = Counter(sample for one in sets for sample in used_in(one))
    assert len(sets) == 3 and max(used.values()) == 1
    assert LENGTH - BATCH - 4 <= len(used) <= LENGTH - BATCH + 4  # groups have about a half of a batch
    assert everyone[0]["weights"] == pytest.approx(weights_of(sets), rel=1e-12, abs=0)


EXACT = """
import os
from subjects import CASES, tell, train
strategy = os.environ["STRATEGY"]
for name in ("mlp, momentum", "batch norm, dropout, short batch"):
    more = {"backup": {"workers": 0}} if strategy == "backup" else {}
    tell(**{name: train(CASES[name]() | {"exact": True, "strategy": strategy} | more, 5)["fingerprint"]})
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [1, 3])
def test_without_backup_workers_it_is_all_reduce_bit_for_bit(printed: Printed, tmp_path: Path, workers: int) -> None:
    plain, backup = (
        printed(EXACT, workers, tmp_path, environment={"STRATEGY": strategy}) for strategy in ("allreduce", "backup")
    )
    assert backup == plain and len(plain[0]) == 2


TAKEN = """
import os
from functools import partial
import torch
from torch import nn
from torch.nn import functional
import paceline
from subjects import classes, mlp, tell

strategies = {"allreduce": {}, "backup": {"backup": {"workers": 0}}}

def fingerprint(strategy, exact=True, **more):
    given = {"model": mlp(), "data": classes(128), "batch": 32, "exact": exact, "timeout_seconds": 60}
    given |= {"strategy": strategy, "optimizer": partial(torch.optim.SGD, lr=0.1)} | strategies[strategy]
    given |= more if "forward" in more else {"loss": functional.cross_entropy} | more
    session = paceline.start(**given)
    for batch in session.batches(steps=3):
        for optimizer in more.get("forward", [None]):
            session.step(batch, optimizer) if optimizer else session.step(batch)
    return session.fingerprint()

def first(model, microbatch):
    return functional.cross_entropy(model["b"](model["a"](microbatch[0])), microbatch[1])

def second(model, microbatch):
    return model["b"](model["a"](microbatch[0])).square().mean()

def phases():
    layers = nn.ModuleDict({"a": nn.Linear(12, 4), "b": nn.Linear(4, 4)})
    return layers

def two(model):
    return {name: torch.optim.SGD(model[name].parameters(), lr=0.1) for name in "ab"}

for strategy in strategies:
    torch.manual_seed(0)
    tell(**{strategy: [
        fingerprint(strategy, optimizer=partial(torch.optim.LBFGS, lr=0.5, max_iter=3)),
        fingerprint(strategy, autocast="float16"),
        fingerprint(strategy, exact="fixed-point"),
        fingerprint(strategy, model=phases(), forward={"a": first, "b": second}, optimizer=two),
    ]})
"""


def test_without_backup_workers_it_takes_what_all_reduce_takes(printed: Printed, tmp_path: Path) -> None:
    """Optimizers with closures, float16, fixed point and several losses."""
    for one in printed(TAKEN, 2, tmp_path):
        assert one["backup"] == one["allreduce"]
        assert len({*one["backup"]}) == 4


CASES = """
from subjects import CASES, tell, train
for name in ("batch norm, dropout, short batch", "layer used sometimes"):
    tell(**{name: train(CASES[name]() | {"strategy": "backup"}, 5)})
"""


@pytest.mark.sampled(1)
@WAYS
def test_all_workers_hold_the_same_model(printed: Printed, tmp_path: Path, one_machine: bool) -> None:
    first, *others = printed(CASES, 3, tmp_path, one_machine=one_machine)
    assert others == [first] * 2 and len(first) == 2
