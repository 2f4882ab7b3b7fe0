"""Optimizers that compute the loss again in a step: as in plain PyTorch, with one hash on any number of workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

# SAM as it is published (github.com/davda54/sam), shortened
HEAD = """
import copy
import os
from functools import partial
import torch
from torch import nn
from torch.nn import functional
import paceline
from subjects import classes, mlp, tell


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for group in self.param_groups for p in group["params"]]), p=2)
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


def sam(parameters):
    return SAM(parameters, torch.optim.SGD, lr=0.1, momentum=0.9)

lbfgs = partial(torch.optim.LBFGS, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

def noisy():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4))

def start(**more):
    given = {"model": noisy(), "data": classes(256), "batch": 64, "exact": True, "timeout_seconds": 60}
    return paceline.start(**given | {"loss": functional.cross_entropy} | more)

def train(session, steps=3):
    for batch in session.batches(steps=steps):
        report = session.step(batch)
    return report
"""

ONE_HASH = (
    HEAD
    + """
from torch.optim.lr_scheduler import StepLR

found = {}
for name, factory in {"sam": sam, "lbfgs": lbfgs}.items():
    for exact in EXACT:
        model = noisy()
        session = start(model=model, optimizer=factory, exact=exact, schedule=partial(StepLR, step_size=2))
        train(session)
        found[f"{name} {exact}"] = session.fingerprint()
    assert int(model[1].num_batches_tracked) == 3
tell(found=found)
"""
)


@pytest.mark.slow
def test_one_hash_on_any_number_of_workers(printed: Printed, tmp_path: Path) -> None:
    found: dict[str, set[str]] = {}
    for workers, exact in ((1, [True, "fixed-point"]), (2, [True, "fixed-point"]), (3, [True])):
        for one in printed(ONE_HASH.replace("EXACT", repr(exact)), workers, tmp_path):
            for name, value in one["found"].items():
                found.setdefault(name, set()).add(value)
    assert len(found) == 4
    assert all(len(hashes) == 1 for hashes in found.values()), found


PLAIN = (
    HEAD
    + """
data = classes(256, dtype=torch.float64)
inputs, targets = data.tensors
for factory in (sam, lbfgs):
    model = mlp(dtype=torch.float64)
    plain = copy.deepcopy(model)
    optimizer = factory(plain.parameters())
    session = start(model=model, optimizer=factory, data=data, batch=256, exact=False, clip_norm=CLIP)
    found, wanted = [], []
    for batch in session.batches(steps=3):
        found.append(session.step(batch).loss)

        def closure():
            optimizer.zero_grad()
            loss = functional.cross_entropy(plain(inputs), targets)
            loss.backward()
            if CLIP:
                nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
            return loss

        wanted.append(closure().item())
        optimizer.step(closure)
    weights = [(one - other).abs().max().item() for one, other in zip(model.parameters(), plain.parameters())]
    tell(**{factory.__name__ if factory is sam else "lbfgs": [found, wanted, weights]})
"""
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_it_trains_as_in_plain_pytorch(printed: Printed, tmp_path: Path, clip: float | None) -> None:
    for told in printed(PLAIN.replace("CLIP", repr(clip)), 2, tmp_path):
        for found, wanted, weights in told.values():
            assert found == pytest.approx(wanted, rel=1e-9)
            assert max(weights) < 1e-9
        assert len(told) == 2


SAVED = (
    HEAD
    + """
for name, factory in {"sam": sam, "lbfgs": lbfgs}.items():
    saves = {"checkpoint": {"directory": os.path.join(os.environ["SAVED"], name)}, "optimizer": factory}
    session = start(**saves)
    train(session, 2)
    session.save()
    train(session, 2)
    again = start(**saves, resume="auto")
    train(again, 4)
    tell(**{name: [session.fingerprint(), again.fingerprint()]})
"""
)


@pytest.mark.slow
def test_it_goes_on_from_a_checkpoint(printed: Printed, tmp_path: Path) -> None:
    (told,) = printed(SAVED, 1, tmp_path, environment={"SAVED": str(tmp_path / "saved")})
    assert all(first == again for first, again in told.values()) and len(told) == 2


REFUSED = (
    HEAD
    + """
def said(**more):
    try:
        train(start(**more))
    except paceline.PacelineError as error:
        return f"{type(error).__name__}: {error}"

class Told(torch.optim.SGD):
    needs_closure = True

def two(model):
    return {"a": lbfgs(model[0].parameters()), "b": torch.optim.SGD(model[4].parameters(), lr=0.1)}

def diverging(parameters):
    return SAM(parameters, torch.optim.SGD, lr=0.1, rho=float("inf"))

def blind(model, microbatch, state):
    return functional.cross_entropy(model(microbatch[0]), microbatch[1]), None

model = noisy()
before = copy.deepcopy(model.state_dict())
session = start(model=model, optimizer=diverging, nonfinite="skip")
report = train(session, 2)
same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
strategies = "pipeline", "parameter-server", "hogwild", "local-sgd", "backup"
tell(
    **{name: said(optimizer=sam, strategy=name, exact=False, loss=functional.cross_entropy) for name in strategies},
    told=said(optimizer=partial(Told, lr=0.1), strategy="backup", exact=False),
    two=said(optimizer=two),
    carried=said(optimizer=lbfgs, loss=None, forward=blind),
    diverging=said(optimizer=diverging),
    same=same,
    applied=report.applied,
)
"""
)


def test_what_cannot_be_computed_again_is_refused(printed: Printed, tmp_path: Path) -> None:
    (told,) = printed(REFUSED, 1, tmp_path)
    assert told.pop("same") is True and told.pop("applied") is False
    for case, words in {
        "pipeline": ["ConfigError", "SAM", "'pipeline'", "'allreduce'"],
        "parameter-server": ["ConfigError", "SAM", "'parameter-server'"],
        "hogwild": ["ConfigError", "SAM", "'hogwild'"],
        "local-sgd": ["ConfigError", "SAM", "'local-sgd'"],
        "backup": ["ConfigError", "SAM", "'backup'"],
        "told": ["ConfigError", "Told", "closure"],
        "two": ["InputError", "LBFGS", "one of 2 optimizers"],
        "carried": ["InputError", "LBFGS", "state from batch to batch"],
        "diverging": ["NonFiniteLoss", "nan", "step 0"],
    }.items():
        assert told[case] and all(word in told[case] for word in words), (case, told[case])
