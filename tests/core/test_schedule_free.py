"""An optimizer that trains other weights than those to evaluate: schedule-free SGD."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

SCRIPT = """
import copy
import os
from functools import partial
import torch
from torch.nn import functional
import paceline
from subjects import classes, mlp, tell


class ScheduleFree(torch.optim.Optimizer):
    # as in the package schedulefree: y = (1 - beta) z + beta x is trained, x is the mean of z
    def __init__(self, params, lr=0.5, beta=0.9):
        super().__init__(params, dict(lr=lr, beta=beta, k=0, train_mode=False))

    @torch.no_grad()
    def _move(self, training):
        for group in self.param_groups:
            weight = 1 - group["beta"] if training else 1 - 1 / group["beta"]
            if group["train_mode"] != training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = training

    def train(self):
        self._move(True)

    def eval(self):
        self._move(False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("Optimizer was not in train mode when step is called.")
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"])
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1))
                z.sub_(p.grad, alpha=group["lr"])


def start(**more):
    given = {"model": mlp(), "data": classes(256), "batch": 64, "optimizer": ScheduleFree, "timeout_seconds": 60}
    given |= {"loss": functional.cross_entropy, "exact": True}
    return paceline.start(**given | more)


def train(session, steps, looks=False):
    for batch in session.batches(steps=steps):
        session.step(batch)
        if looks:
            session.evaluate(classes(64))
            session.model_state()
"""

WEIGHTS = (
    SCRIPT
    + """
model = mlp()
plain = copy.deepcopy(model)
session = start(model=model, batch=256)
optimizer = ScheduleFree(plain.parameters())
inputs, targets = classes(256).tensors
optimizer.train()
for batch in session.batches(steps=4):
    session.step(batch)
    optimizer.zero_grad()
    functional.cross_entropy(plain(inputs), targets).backward()
    optimizer.step()
trained = [copy.deepcopy(plain.state_dict()), copy.deepcopy(model.state_dict())]
optimizer.eval()
measured = session.evaluate(classes(256))
state = session.model_state()
session.export(os.environ["EXPORTED"] + "/weights.pt")
exported = torch.load(os.environ["EXPORTED"] + "/weights.pt")


def apart(one, other):
    return max((one[name] - other[name]).abs().max().item() for name in one)


tell(
    loss=[measured, functional.cross_entropy(plain(inputs), targets).item()],
    near=[apart(trained[0], trained[1]), apart(plain.state_dict(), state), apart(state, exported)],
    far=apart(trained[0], plain.state_dict()),
    back=apart(trained[1], model.state_dict()),
)
"""
)


def test_what_is_evaluated_and_exported(printed: Printed, tmp_path: Path) -> None:
    (told,) = printed(WEIGHTS, 1, tmp_path, environment={"EXPORTED": str(tmp_path)})
    assert told["loss"][0] == pytest.approx(told["loss"][1], rel=1e-5)
    assert max(told["near"]) < 1e-5 and told["far"] > 1e-3 and told["back"] == 0


BITS = (
    SCRIPT
    + """
saves = {"checkpoint": {"directory": os.environ["SAVED"]}}
session = start(**saves)
train(session, 2, looks=True)
session.save()
train(session, 2)
found = [session.fingerprint()]
session = start()
train(session, 4)
found.append(session.fingerprint())
again = start(**saves, resume="auto")
train(again, 4)
found.append(again.fingerprint())


def said(strategy):
    try:
        start(strategy=strategy, exact=False)
    except paceline.ConfigError as error:
        return str(error)


tell(found=found, said={name: said(name) for name in ("pipeline", "parameter-server", "hogwild")})
"""
)


def test_looking_changes_no_bits(printed: Printed, tmp_path: Path) -> None:
    hashes = set()
    for workers in (1, 2):
        (tmp_path / str(workers)).mkdir()
        saved = {"SAVED": str(tmp_path / str(workers) / "saved")}
        for one in printed(BITS, workers, tmp_path / str(workers), environment=saved):
            hashes.update(one["found"])
            for name, text in one["said"].items():
                assert "ScheduleFree" in text and repr(name) in text, text
    assert len(hashes) == 1
