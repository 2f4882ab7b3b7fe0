"""Losses that take turns on a batch: a GAN is trained to one hash, as in plain PyTorch."""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

# A WGAN-GP as it is published, and what remains of it; HERE: what the test adds
PLAIN = """
import torch
from torch import nn

torch.manual_seed(0)
G = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 12))
D = nn.Sequential(nn.Linear(12, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
dataset = torch.randn(256, 12)
loader = torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True)
opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.0, 0.9))
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.0, 0.9))


def gradient_penalty(D, real, fake):
    mix = torch.rand(len(real), 1)
    mixed = (mix * real + (1 - mix) * fake).requires_grad_()
    slope, = torch.autograd.grad(D(mixed).sum(), mixed, create_graph=True)
    return ((slope.norm(dim=1) - 1) ** 2).mean()


for epoch in range(3):
    for i, real in enumerate(loader):
        fake = G(torch.randn(len(real), 8)).detach()
        loss_d = D(fake).mean() - D(real).mean() + 10 * gradient_penalty(D, real, fake)
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()
        if i % 2 == 0:
            loss_g = -D(G(torch.randn(len(real), 8))).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
    print(epoch, loss_d.item(), loss_g.item())
"""
PORTED = """
import torch
from torch import nn
import paceline

torch.manual_seed(0)
G = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 12))
D = nn.Sequential(nn.Linear(12, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
dataset = torch.randn(256, 12)


def gradient_penalty(D, real, fake):
    mix = torch.rand(len(real), 1)
    mixed = (mix * real + (1 - mix) * fake).requires_grad_()
    slope, = torch.autograd.grad(D(mixed).sum(), mixed, create_graph=True)
    return ((slope.norm(dim=1) - 1) ** 2).mean()


def loss_d(m, real):
    fake = G(torch.randn(len(real), 8)).detach()
    return D(fake).mean() - D(real).mean() + 10 * gradient_penalty(D, real, fake)


def loss_g(m, real):
    return -D(G(torch.randn(len(real), 8))).mean()


def adam(model):
    return {name: torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.0, 0.9)) for name, part in model.items()}


session = paceline.start(model=nn.ModuleDict({"D": D, "G": G}), forward={"D": loss_d, "G": loss_g}, optimizer=adam,
                         data=dataset, batch=64)
for epoch in range(3):
    for i, real in enumerate(session.batches(epochs=1)):
        loss_d = session.step(real, optimizer="D").loss
        if i % 2 == 0:
            loss_g = session.step(real, optimizer="G").loss
    print(epoch, loss_d, loss_g)
"""
TOLD = """
from subjects import tell
tell(fingerprint=session.fingerprint())
"""


def changed_lines(before: str, after: str) -> int:
    """Lines that are new or other ones; a line that only moved into a function counts, too."""
    lines = [[line.rstrip() for line in text.splitlines() if line.strip()] for text in (before, after)]
    return sum(line.startswith("+ ") for line in difflib.ndiff(*lines))


def test_a_published_gan_takes_few_lines(printed: Printed, tmp_path: Path) -> None:
    assert changed_lines(PLAIN, PORTED) <= 20
    told = []
    for workers, environment in (
        (1, {}),
        (3, {}),
        (2, {"PACELINE_STRATEGY": "stealing"}),
        (2, {"PACELINE_STRATEGY": "auto"}),
    ):
        told += printed(PORTED + TOLD, workers, tmp_path, environment={"PACELINE_EXACT": "true"} | environment)
    assert len({one["fingerprint"] for one in told}) == 1


# without batch statistics and random numbers, so that the numbers are those of plain PyTorch
HEAD = """
import os
from functools import partial
import torch
from torch import nn
from torch.nn.functional import softplus
import paceline
from subjects import tell

torch.manual_seed(0)
model = nn.ModuleDict({"G": nn.Linear(4, 6), "D": nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))})
data = torch.randn(64, 10)

def loss_d(model, pair):
    return softplus(-model["D"](pair[:, :6])).mean() + softplus(model["D"](model["G"](pair[:, 6:]))).mean()

def loss_g(model, pair):
    return softplus(-model["D"](model["G"](pair[:, 6:]))).mean()

def optimizers(model):
    return {name: torch.optim.SGD(model[name].parameters(), lr=0.1, momentum=0.9) for name in "DG"}

given = {"model": model, "forward": {"D": loss_d, "G": loss_g}, "optimizer": optimizers, "data": data, "batch": 64}
given |= {"timeout_seconds": 30}
"""
REFERENCE = (
    HEAD
    + """
import copy
plain = copy.deepcopy(model)
session = paceline.start(**given, schedule={"G": partial(torch.optim.lr_scheduler.StepLR, step_size=2)})
optimizer, found, wanted = optimizers(plain), [], []
schedule = torch.optim.lr_scheduler.StepLR(optimizer["G"], step_size=2)
for batch in session.batches(steps=6):
    for name, loss in (("D", loss_d), ("G", loss_g), ("D", loss_d)):
        report = session.step(batch, optimizer=name)
        found.append([report.loss, report.learning_rate, report.gradient_norm, report.samples])
        plain.zero_grad()
        value = loss(plain, data)
        value.backward()
        norm = torch.stack([one.grad.norm() for one in plain[name].parameters()]).norm().item()
        wanted.append([value.item(), optimizer[name].param_groups[0]["lr"], norm, 64 * (batch.step + 1)])
        optimizer[name].step()
        if name == "G":
            schedule.step()
assert all(one.requires_grad for one in model.parameters())
tell(found=found, wanted=wanted)
"""
)


def test_it_trains_as_in_plain_pytorch(printed: Printed, tmp_path: Path) -> None:
    for told in printed(REFERENCE, 2, tmp_path):
        for found, wanted in zip(told["found"], told["wanted"], strict=True):
            assert found == pytest.approx(wanted, rel=1e-4)


REFUSED = (
    HEAD
    + """
def said(act):
    try:
        act()
    except paceline.PacelineError as error:
        return f"{type(error).__name__}: {error}"

def start(**more):
    return paceline.start(**given | more)

found = {
    "names": said(lambda: start(forward={"D": loss_d, "C": loss_g})),
    "missing": said(lambda: start(forward={"D": loss_d})),
    "one": said(lambda: start(optimizer=partial(torch.optim.SGD, lr=0.1))),
    "strategy": said(lambda: start(strategy="backup")),
}
session = start(forward=loss_d)
(batch,) = session.batches(steps=1)
found["one forward"] = said(lambda: session.step(batch, optimizer="D"))
session = start(checkpoint={"directory": os.environ["SAVED"]})
batches = list(session.batches(steps=2))  # as a script that keeps them
found["unsaid"] = said(lambda: session.step(batches[1]))
found["unknown"] = said(lambda: session.step(batches[1], optimizer="E"))
found["metric"] = said(lambda: session.evaluate(data))
value = session.evaluate(data, loss_g)
session.step(batches[1], optimizer="D")
found["older"] = said(lambda: session.step(batches[0], optimizer="G"))
session.save()
found["saved"] = said(lambda: session.step(batches[1], optimizer="G"))
tell(**found, value=value)
"""
)


def test_what_cannot_work_is_said(printed: Printed, tmp_path: Path) -> None:
    (told,) = printed(REFUSED, 1, tmp_path, environment={"SAVED": str(tmp_path / "saved")})
    assert told.pop("value") > 0
    for case, words in {
        "names": ["InputError", "'D', 'C'", "'D', 'G'"],
        "missing": ["InputError", "'D'", "'D', 'G'"],
        "one": ["InputError", "one without a name"],
        "strategy": ["ConfigError", "'backup'", "'allreduce'"],
        "one forward": ["ConfigError", "optimizer='D'", "one forward"],
        "unsaid": ["ConfigError", "no optimizer is named", "'D', 'G'"],
        "unknown": ["ConfigError", "'E'", "'D', 'G'"],
        "metric": ["InputError", "metric(model, microbatch)"],
        "older": ["InputError", "step 0 is over", "next one"],
        "saved": ["InputError", "step 1 is over", "saved"],
    }.items():
        assert told[case] and all(word in told[case] for word in words), (case, told[case])


def test_workers_in_different_phases(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    script = HEAD + (
        "session = paceline.start(**given)\n"
        "for batch in session.batches(steps=2):\n"
        "    session.step(batch, optimizer='D' if session.rank else 'G')\n"
    )
    for one in ranks(script, 2, tmp_path):
        assert one.code != 0
        assert (
            "DisagreementError: The workers are not in the same phase: rank 0 at step 0 with optimizer='G'" in one.err
        )


FROZEN = (
    HEAD
    + """
model["G"].bias.requires_grad_(False)
before = model["G"].bias.clone()
session = paceline.start(**given)
for batch in session.batches(steps=2):
    for name in "DG":
        session.step(batch, optimizer=name)
        tell(**{name: model["G"].bias.requires_grad})
tell(moved=not torch.equal(model["G"].bias, before), trained=model["G"].weight.requires_grad)
"""
)


def test_a_phase_leaves_frozen_parameters_of_others_frozen(printed: Printed, tmp_path: Path) -> None:
    (one,) = printed(FROZEN, 1, tmp_path)
    assert one == {"D": False, "G": False, "moved": False, "trained": True}
