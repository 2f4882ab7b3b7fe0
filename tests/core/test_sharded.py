"""Sharded training has the bits of one process, divides the optimizer's state, and composes with the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]
SLOW = pytest.mark.slow(turns=9)
ELSEWHERE = [1, 1, 1], [4], [2, 1], [2, 2]
SIZES = "held", "later"
DIVIDED = (
    *(
        "AdamW",
        "Muon",
        "Lamb",
        "clipped",
        "clipped, large",
        "skipped",
        "changed by the loop",
        "partly frozen",
        "empty",
        "averaged",
    ),
    *("size", "moved", "not divisible, small buckets", "small buckets, gradients", "fixed point", "int8"),
)

SCRIPT = """
import json, os
from functools import partial
import torch
from torch import nn
from torch.nn import functional
import torch.nn.utils.prune
import paceline
from subjects import CASES, classes, mlp, tell
from odd_optimizers import NOISY, NORMED

exec(NORMED + NOISY)
optim = torch.optim
strategy = "sharded" if int(os.environ["WORLD_SIZE"]) > 1 else "single"

def start(**more):
    given = {"model": mlp(12, 4), "loss": functional.cross_entropy, "data": classes(200), "batch": 48, "exact": True}
    given |= {"strategy": strategy, "optimizer": partial(optim.AdamW, lr=1e-2)} | json.loads(os.environ["MORE"])
    return paceline.start(**given | more)

def steps(session, count=4):
    losses = [session.step(batch).loss.hex() for batch in session.batches(steps=count)]
    return [session.fingerprint(), losses[-1]]

def muon_and_adamw(named_parameters):
    named = list(named_parameters)
    matrices = [pair for pair in named if pair[1].ndim == 2]
    rest = [pair for pair in named if pair[1].ndim != 2]
    return {"muon": optim.Muon(matrices, lr=0.02), "adamw": optim.AdamW(rest, lr=1e-2)}

def groups(model):
    weights = [value for value in model.parameters() if value.ndim > 1]
    biases = [value for value in model.parameters() if value.ndim == 1]
    return optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.03}], lr=1e-2)

class Lamb(optim.Optimizer):
    # the step of each tensor is scaled by its norm
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
    def step(self, closure=None):
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    mean = self.state[value].setdefault("mean", torch.zeros_like(value))
                    mean.lerp_(value.grad, 0.1)
                    with torch.no_grad():
                        value.sub_(mean, alpha=group["lr"] * float(value.norm() / (mean.norm() + 1e-6)))

def frozen():
    session = start()
    for batch in session.batches(steps=6):
        session._context.compute.model[0].requires_grad_(batch.step % 3 != 1)
        session.step(batch)
    return session.fingerprint()

def changed():
    session = start()
    model = session._context.compute.model
    for batch in session.batches(steps=6):
        session.step(batch)
        with torch.no_grad():
            model[0].weight.clamp_(-0.2, 0.2)
        for group in session._context.update.optimizer.param_groups:
            group["lr"] *= 0.9
    return session.fingerprint()

def skipped(**more):
    data = classes(200)
    data.tensors[0][[5, 80, 81]] = float("nan")
    session = start(data=data, nonfinite="skip", **more)
    applied = [session.step(batch).applied for batch in session.batches(steps=8)]
    assert not all(applied) and any(applied)
    return [session.fingerprint(), applied]

def replaced():
    session = start()
    model = session._context.compute.model
    for batch in session.batches(steps=6):
        session.step(batch)
        for value in model.parameters():
            value.data = value.data.clamp(-0.2, 0.2)
    return session.fingerprint()

def by_groups():
    session = start()
    doubled = session._context.compute.model[0].weight
    doubled.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", 2 * weight.grad))
    for batch in session.batches(steps=6):
        session.step(batch)
        with torch.no_grad():
            for group in session._context.update.optimizer.param_groups:
                for value in group["params"]:
                    value.clamp_(-0.2, 0.2)
    return session.fingerprint()

def viewed():
    # somebody else looks at a weight, so it stays where it is
    model = mlp(12, 4)
    seen = model[0].weight.detach().view(-1)
    session, found = start(model=model), []
    for batch in session.batches(steps=4):
        session.step(batch)
        assert torch.equal(seen, model[0].weight.detach().view(-1))
        found.append(float(seen.sum()).hex())
    return [session.fingerprint(), found]

def partly_frozen():
    # weights that are not trained, which the loop changes, and of another type
    model = mlp(12, 4)
    model.register_parameter("scale", nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False))
    model[2].requires_grad_(False)
    session = start(model=model, optimizer=lambda model: optim.AdamW(
        [value for value in model.parameters() if value.requires_grad], lr=1e-2))
    for batch in session.batches(steps=6):
        session.step(batch)
        model.scale.mul_(0.75)
        model[2].bias.data.add_(0.01)
    return [session.fingerprint(), model.scale.tolist()]

class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.none = mlp(12, 4), nn.Parameter(torch.zeros(0, 3))
        self.flat, self.one = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.ones(1))
    def forward(self, values):  # the gradient of a sum has strides of 0
        return self.layer(values) * self.one.sum() + self.none.sum() + self.flat.sum()

def averaged(**more):
    session, found = start(average={"kind": "ema", "decay": 0.9}, **more), []
    for batch in session.batches(steps=4):
        session.step(batch)
        if batch.step in (1, 2):
            found.append(session.evaluate(classes(50)).hex())
            with session.averaged():
                found.append(session.evaluate(classes(50)).hex())
                found.append(sum(value.double().sum().item() for value in session.model_state().values()))
    return [session.fingerprint(), *found]

def evaluated():
    session, found = start(), []
    for batch in session.batches(steps=6):
        session.step(batch)
        if batch.step % 2:
            found.append(session.evaluate(classes(50)).hex())
    return [session.fingerprint(), *found]

def between():
    session, found = start(), []
    for batch in session.batches(steps=4):
        session.step(batch)
        if batch.step == 1:
            session.evaluate(classes(50))
            try:
                session.fingerprint()
            except paceline.InputError as error:
                found.append(str(error))
    assert strategy == "single" or "have not hashed it since the last step" in found[0]
    return session.fingerprint()

def elements(optimizer):
    return sum(value.numel() for state in optimizer.state.values() for key, value in state.items() if key == "exp_avg")

def clipped():
    # a parameter that is larger than a share is cut, also if gradients are clipped by the norm of all
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 500), nn.ReLU(), nn.Linear(500, 4), nn.Linear(4, 4))
    session = start(model=model, clip_norm=0.1)
    for batch in session.batches(steps=4):
        norm = session.step(batch).gradient_norm
        share = elements(session._context.update.optimizer) / sum(value.numel() for value in model.parameters())
    copies = {"shard_copy", "shard_within"} & json.loads(os.environ["MORE"]).keys()
    assert share < (0.7 if strategy == "sharded" and not copies else 2)
    return [session.fingerprint(), norm.hex()]

def size():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 300), nn.ReLU(), nn.Linear(300, 70), nn.Linear(70, 4))
    session = start(checkpoint={"directory": os.environ["SAVED"] + " sized"}, model=model)
    for batch in session.batches(steps=2):
        session.step(batch)
        held = elements(session._context.update.optimizer)
    found = session.fingerprint()
    session.evaluate(classes(50))
    session.save()
    tell(held=held, later=elements(session._context.update.optimizer))
    again = start(checkpoint={"directory": os.environ["SAVED"] + " sized"}, resume="auto", model=model)
    assert elements(again._context.update.optimizer) == held and again.fingerprint() == found
    return found

def moved():
    kept = {"checkpoint": {"directory": os.environ["SAVED"]}}
    session = start(**kept)
    steps(session, 3)
    session.save()
    found = []
    for other in ("sharded", "allreduce", "pipeline", "sharded"):
        cut = {"pipeline": {"stages": 2}} if other == "pipeline" and strategy == "sharded" else {}
        again = start(**kept, **cut, resume="auto", strategy=other if strategy == "sharded" else "single")
        found.append(steps(again, 5)[0])
    assert len(set(found)) == 1, found
    return found[0]

ways = {
    "AdamW": lambda: steps(start()),
    "fused": lambda: steps(start(optimizer=partial(optim.AdamW, lr=1e-2, fused=True))),
    "groups": lambda: steps(start(optimizer=groups)),
    "SGD": lambda: steps(start(optimizer=partial(optim.SGD, lr=0.1, momentum=0.9))),
    "Adafactor": lambda: steps(start(optimizer=partial(optim.Adafactor, lr=1e-2))),
    "Muon": lambda: steps(start(optimizer=muon_and_adamw)),
    "Lamb": lambda: steps(start(optimizer=Lamb)),
    "clipped": lambda: steps(start(clip_norm=0.1)),
    "clipped, large": clipped,
    "average": lambda: steps(start(average={"kind": "ema", "decay": 0.9})),
    "float16": lambda: steps(start(autocast="float16")),
    "bfloat16 weights": lambda: steps(start(model=mlp(12, 4).bfloat16(), data=classes(200, dtype=torch.bfloat16))),
    "frozen in between": frozen,
    "changed by the loop": changed,
    "skipped": skipped,
    "replaced by the loop": replaced,
    "a view is kept": viewed,
    "partly frozen": partly_frozen,
    "optimizer": lambda: steps(start(shard="optimizer")),
    "gradients": lambda: steps(start(shard="gradients")),
    "changed by groups": by_groups,
    "empty": lambda: steps(start(model=Empty())),
    "empty, whole": lambda: steps(start(model=Empty(), clip_norm=0.1)),
    "averaged": averaged,
    "averaged, gradients": lambda: averaged(shard="gradients"),
    "evaluated": evaluated,
    "between": between,
    "size": size,
    "moved": moved,
    **{
        name: lambda name=name: steps(paceline.start(**CASES[name]() | {"exact": True, "strategy": strategy}), 5)
        for name in CASES if not name.startswith("mlp")
    },
    **{  # sums overwrite those of buckets before, also where gradients come in another order, or not at all
        f"{name}, small buckets": lambda name=name: steps(
            paceline.start(**CASES[name]() | {"exact": True, "strategy": strategy, "bucket_megabytes": 0.0005}), 5
        )
        for name in ("transformer, tied weights, clipping, schedule", "layer used sometimes", "not divisible")
    },
    "small buckets, gradients": lambda: steps(start(shard="gradients", bucket_megabytes=0.0005)),
    "fixed point": lambda: steps(start(exact="fixed-point", clip_norm=0.1)),
    "fixed point, optimizer": lambda: steps(start(exact="fixed-point", shard="optimizer")),
    "skipped in fixed point": lambda: skipped(exact="fixed-point"),
    "int8": lambda: steps(start(wire="int8")),
    "int4, gradients": lambda: steps(start(wire="int4", shard="gradients", autocast="float16")),
    "by class": lambda: steps(start(wire="Linear=fp8-e4m3", shard="optimizer", bucket_megabytes=0.0005)),
}
def refused(act):
    try:
        act()
    except paceline.InputError as error:
        return [str(error), str(error.__context__)]

def by_hand(act):
    kept = []
    def make(parameters):
        kept.append(optim.AdamW(parameters, lr=1e-2))
        return kept[0]
    session = start(optimizer=make)
    for batch in session.batches(steps=2):
        session.step(batch)
        act(kept[0])

def kept():
    optimizers = []
    def make(parameters):
        optimizers.append(optim.AdamW(parameters, lr=1e-2))
        return optimizers[0]
    steps(start(optimizer=make), 2)
    try:
        start(optimizer=lambda parameters: optimizers[0])
    finally:
        by_hand(lambda _: optimizers[0].state_dict())

def converted():
    model = mlp(12, 4)
    session = start(model=model, loss=None, forward=lambda model, rows: functional.cross_entropy(
        model(rows[0].to(next(model.parameters()).dtype)).float(), rows[1]))
    for batch in session.batches(steps=2):
        session.step(batch)
        model.bfloat16()

def renamed():
    model = mlp(12, 4)
    session = start(model=model)
    for batch in session.batches(steps=2):
        session.step(batch)
        nn.utils.prune.l1_unstructured(model[0], "weight", 0.5)

if "REFUSED" in os.environ:
    ways = {
        "contradicting": lambda: steps(start(shard_copy=False, shard_within="machine")),
        "converted": converted,
        "renamed": renamed,
        "kept": lambda: refused(kept),
        "copied": lambda: start(shard_copy=True)._context.probe_results.warnings,
        "state_dict": lambda: by_hand(lambda optimizer: optimizer.state_dict()),
        "load_state_dict": lambda: by_hand(lambda optimizer: optimizer.load_state_dict({})),
        "state": lambda: by_hand(lambda optimizer: optimizer.state[optimizer.param_groups[0]["params"][0]]),
        "Normed": lambda: steps(start(optimizer=partial(Normed, lr=0.1))),
        "Noisy": lambda: steps(start(optimizer=partial(Noisy, lr=0.1))),
        "LBFGS": lambda: steps(start(optimizer=optim.LBFGS)),
        "partial": lambda: steps(start(wire="topk")),
    }
for name in os.environ["ONLY"].split(";") if "ONLY" in os.environ else ways:
    way = ways[name]
    try:
        tell(**{name: way()})
    except paceline.PacelineError as error:
        tell(**{name: f"{type(error).__name__}: {error}"})
"""


@pytest.fixture(scope="module")
def alone(printed: Printed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("alone")
    return printed(SCRIPT, 1, directory, environment={"SAVED": str(directory / "saved"), "MORE": "{}"})[0]


COPIED, WITHIN = {"shard_copy": True}, {"shard_within": "machine"}


@pytest.mark.parametrize(
    ("machines", "more"),
    [
        ([2], {}),
        *(pytest.param(one, {}, marks=SLOW) for one in ELSEWHERE),
        *(pytest.param(one, COPIED, marks=SLOW) for one in ([3], [1, 1, 1], [2, 2])),
        *(pytest.param(one, WITHIN, marks=SLOW) for one in ([2, 1], [2, 2])),
    ],
    ids=str,
)
def test_the_bits_are_those_of_one_process(
    printed: Printed, alone: dict[str, Any], tmp_path: Path, machines: list[int], more: dict[str, Any]
) -> None:
    check(printed, alone, tmp_path, machines, more, {})


@pytest.mark.slow
def test_so_they_are_of_machines_that_each_hold_the_whole(printed: Printed, alone: Any, tmp_path: Path) -> None:
    """The ways that divide, gather or add up differently; the others only change what a worker does with its part."""
    wanted = {name: alone[name] for name in (*DIVIDED, *SIZES)}
    check(printed, wanted, tmp_path, [2, 2], WITHIN, {"ONLY": ";".join(DIVIDED)})


def check(
    printed: Printed,
    alone: dict[str, Any],
    directory: Path,
    machines: list[int],
    more: dict[str, Any],
    environment: dict[str, str],
) -> None:
    """Check that each worker has the bits of one process, and its share of the optimizer's state."""
    environment = environment | {"SAVED": str(directory / "saved"), "MORE": json.dumps(more)}
    workers = sum(machines)
    everyone = printed(SCRIPT, workers, directory, machines=machines, environment=environment)
    sizes = [(one.pop("held"), one.pop("later")) for one in everyone]
    total = alone["held"]
    copies = len(machines) if more == WITHIN else 2 if more == COPIED else 1
    assert sum(held for held, _ in sizes) == copies * total
    if machines != [2, 1]:
        assert max(held for held, _ in sizes) <= copies * total / workers + 64
    assert all(held == later for held, later in sizes), "put together to hash, evaluate or save"
    wanted = {name: value for name, value in alone.items() if name not in SIZES}
    for one in everyone:
        assert one == wanted
    assert not [value for value in wanted.values() if "Error" in str(value)]


def test_what_cannot_be_divided_is_refused(printed: Printed, tmp_path: Path) -> None:
    for found in printed(SCRIPT, 2, tmp_path, environment={"REFUSED": "1", "MORE": "{}"}):
        assert "Normed updates a parameter differently when the others have no gradients" in found["Normed"]
        assert "Noisy draws random numbers" in found["Noisy"] and "'allreduce'" in found["Noisy"]
        assert "LBFGS" in found["LBFGS"] and "allreduce" in found["LBFGS"]
        assert found["partial"].startswith("ConfigError: strategy 'sharded' cannot send gradients as topk")
        assert found["contradicting"].startswith("ConfigError: shard_copy = False contradicts shard_within")
        assert "this run ends when a worker is lost" in found["copied"][-1]
        assert "torch.float32 with strides (12, 1) to torch.bfloat16" in found["converted"]
        assert "'0.weight' became '0.weight_orig' after paceline.start" in found["renamed"]
        for text in found["kept"]:
            assert text.startswith("This worker has only a part of the optimizer's state")
        for call in ("state_dict", "load_state_dict", "state"):
            assert found[call].startswith("InputError: This worker has only a part of the optimizer's state")


VERSIONS = """
import torch
import paceline
from subjects import classes, tell

model = torch.nn.Linear(12, 4)
session = paceline.start(
    model=model, data=classes(64), optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    loss=torch.nn.functional.cross_entropy, batch=8, microbatches=4, strategy="sharded",
)
before = [value._version for value in model.parameters()]
for batch in session.batches(steps=1):
    session.step(batch)
tell(changed=[value._version > version for value, version in zip(model.parameters(), before)])
"""


def test_autograd_knows_that_the_weights_have_changed(printed: Printed, tmp_path: Path) -> None:
    """Then the backward pass of a graph that an earlier step has kept is refused, as with all strategies."""
    assert printed(VERSIONS, 2, tmp_path) == [{"changed": [True, True]}] * 2
