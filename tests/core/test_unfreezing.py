"""Parameters that are frozen at the start are trained later, alike on all workers, and resumed as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

HEAD = """
import os
import torch
from torch import nn
from torch.nn import functional
import paceline
from subjects import tell

inputs = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    return model.requires_grad_(False)

def unfreeze(model, epoch):
    for layer in (4, 2, 0)[:epoch + 1]:
        model[layer].requires_grad_(True)

def everything(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)

def start(model=None, optimizer=everything, **settings):
    model = model or build()
    unfreeze(model, 0)
    given = dict(model=model, optimizer=optimizer, loss=functional.cross_entropy, data=data, batch=16)
    return model, paceline.start(**given | dict(timeout_seconds=60) | settings)

def train(model, session, epochs, begin=0):
    for epoch in range(begin, epochs):
        unfreeze(model, epoch)
        for batch in session.batches(epochs=1):
            session.step(batch)
"""

ALONE = """
reference, optimizer = build(), None
unfreeze(reference, 0)
optimizer = everything(reference)
model, session = start(microbatches=1)
for epoch in range(3):
    unfreeze(model, epoch)
    unfreeze(reference, epoch)
    for batch in session.batches(epochs=1):
        (group,) = batch.groups
        given, target = group.data
        optimizer.zero_grad()
        functional.cross_entropy(reference(given), target).backward()
        optimizer.step()
        session.step(batch)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), reference.parameters()))
assert not torch.equal(model[0].weight, build()[0].weight)

try:
    model, session = start(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    train(model, session, 2)
except paceline.InputError as error:
    tell(said=str(error))
"""


def test_a_parameter_is_unfrozen_as_in_plain_torch(printed: Printed, tmp_path: Path) -> None:
    (one,) = printed(HEAD + ALONE, 1, tmp_path)
    assert one["said"].startswith(
        "The parameter '2.weight' was frozen at the start and requires a gradient now, but the optimizer does not have "
        "it. A factory gets frozen ones too if its parameter is called model: lambda model: "
    )


STRATEGIES = """
found = {}
for name, settings in dict(
    allreduce={},
    stealing=dict(strategy="stealing"),
    servers=dict(strategy="parameter-server"),
    pipeline=dict(strategy="pipeline"),
).items():
    model, session = start(**settings, exact=True)
    train(model, session, 3)
    found[name] = session.fingerprint()

folder = f"{FOLDER}/kept-{session.workers}"
model, session = start(exact=True, checkpoint=folder)
train(model, session, 2)
session.save()
model = build()
model, session = start(model, exact=True, checkpoint=folder, resume="auto")
found["what is trained"] = [name for name, value in model.named_parameters() if value.requires_grad]
list(session.batches(epochs=2))
train(model, session, 3, begin=2)
found["resumed"] = session.fingerprint()

for name, settings in {"async": dict(strategy="parameter-server", server=dict(mode="async")),
                       "local-sgd": dict(strategy="local-sgd", local=dict(every=1)),
                       "hogwild": dict(strategy="hogwild"),
                       "pipedream": dict(strategy="pipeline", pipeline=dict(schedule="pipedream"))}.items():
    model, session = start(**settings)
    train(model, session, 2)
    state, before = session.model_state(), build().state_dict()
    moved = {key for key, value in state.items() if not torch.equal(value, before[key])}
    assert moved == {"2.weight", "2.bias", "4.weight", "4.bias"}, (name, moved)
tell(**found)
"""


@pytest.mark.slow
def test_the_same_bits_on_any_number_of_workers(printed: Printed, tmp_path: Path) -> None:
    script = HEAD + STRATEGIES.replace("FOLDER", repr(str(tmp_path)))
    runs = [printed(script, workers, tmp_path) for workers in (1, 3)]
    for one in [one for run in runs for one in run]:
        assert one["what is trained"] == ["2.weight", "2.bias", "4.weight", "4.bias"]
        assert len({value for key, value in one.items() if key != "what is trained"}) == 1
        assert one == runs[0][0]


DIFFERS = """
said = []
for strategy, exact in (("allreduce", False), ("stealing", True)):
    model, session = start(strategy=strategy, exact=exact)
    try:
        for batch in session.batches(steps=6):
            if batch.step == 3 and session.rank == 0:
                unfreeze(model, 1)
            session.step(batch)
        session.evaluate(data)
    except paceline.PacelineError as error:
        said.append(f"{type(error).__name__}: {error}")
        break
tell(said=said)
"""


def test_what_only_one_worker_unfreezes_is_named(printed: Printed, tmp_path: Path) -> None:
    cases = '(("allreduce", False), ("stealing", True))'
    for place in range(2):
        for one in printed(HEAD + DIFFERS.replace(cases, f"{cases}[{place}:{place + 1}]"), 2, tmp_path):
            (said,) = one["said"]
            assert "DisagreementError: The parameter '2.weight' is frozen on rank 1, and not on rank 0." in said
