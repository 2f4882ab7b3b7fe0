"""Averages of the weights: the numbers of torch, and the same bits on any number of workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

HEAD = """
from functools import partial
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
import paceline
from paceline.checkpoint.tensors import fingerprint
from subjects import tell

inputs = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3), nn.Linear(3, 3))

EMA = {"kind": "ema", "decay": 0.9, "after": 2}
SWA = {"kind": "swa", "after": 1, "every": 2}

def start(**settings):
    model = build()
    adam = partial(torch.optim.AdamW, lr=0.01)
    given = dict(model=model, optimizer=adam, loss=functional.cross_entropy, data=data, batch=16, timeout_seconds=60)
    return model, paceline.start(**given | settings)

def averaged(session):
    with session.averaged():
        return session.model_state()
"""

REFERENCE = """
for average, function in ((EMA, get_ema_multi_avg_fn(0.9)), (SWA, get_swa_multi_avg_fn())):
    model, session = start(average=average)
    expected = AveragedModel(model, multi_avg_fn=function)
    for batch in session.batches(steps=9):
        if batch.step == 2:
            assert fingerprint(averaged(session)) == fingerprint(session.model_state()) or average is SWA
        session.step(batch)
        done = batch.step + 1 - average["after"]
        if done > 0 and done % average.get("every", 1) == 0:
            expected.update_parameters(model)
    found, weights = averaged(session), session.model_state()
    for name, value in expected.module.named_parameters():
        assert torch.equal(found[name], value), name
        assert not torch.equal(found[name], weights[name])
    assert torch.equal(found["1.running_mean"], weights["1.running_mean"])
    plain = session.evaluate(data)
    with session.averaged():
        value = session.evaluate(data)
        path = session.export(FOLDER + "/averaged.pt")
    model.load_state_dict(torch.load(path, weights_only=True))
    model.eval()
    with torch.no_grad():
        assert abs(functional.cross_entropy(model(inputs), data[:][1]) - value) < 1e-6
    assert value != plain

half, session = start(average="ema")
half, session = start(average=dict(kind="ema", decay=0.999), model=build().bfloat16(), data=[
    (value.bfloat16(), target) for value, target in data
])
before = averaged(session)["0.weight"]
for batch in session.batches(steps=3):
    session.step(batch)
(kept,) = {value.dtype for value in session._context.update.averages.values().values()}
assert (kept, averaged(session)["0.weight"].dtype) == (torch.float32, torch.bfloat16)

said = []
for wrong in ("hogwild", "unset", "step"):
    try:
        if wrong == "hogwild":
            start(strategy="hogwild", average="swa")
        model, session = start(average="swa" if wrong == "step" else None)
        with session.averaged():
            session.step(next(session.batches(steps=1)))
    except paceline.ConfigError as error:
        said.append(str(error))
tell(said=said)
"""


@pytest.mark.slow
def test_the_averages_are_those_of_torch(printed: Printed, tmp_path: Path) -> None:
    (one,) = printed(HEAD + REFERENCE.replace("FOLDER", repr(str(tmp_path))), 1, tmp_path)
    hogwild, unset, step = one["said"]
    assert hogwild.startswith("strategy 'hogwild' cannot keep an average of the weights (average = 'swa')")
    assert unset == "session.averaged() needs an average of the weights: set average='ema', or 'swa'."
    assert step.startswith("session.step() inside session.averaged(): training continues from the weights themselves.")


STRATEGIES = """
exact = {
    "allreduce": {},
    "stealing": dict(strategy="stealing"),
    "servers": dict(strategy="parameter-server"),
    "pipeline": dict(strategy="pipeline"),
}
other = {
    "async": dict(strategy="parameter-server", server=dict(mode="async")),
    "local-sgd": dict(strategy="local-sgd", local=dict(every=2)),
    "pipedream": dict(strategy="pipeline", pipeline=dict(schedule="pipedream")),
}
found = {}
for name, settings in (exact | (other if ELSE else {})).items():
    for average in (EMA, SWA):
        model, session = start(**settings, average=average, exact=name in exact)
        for batch in session.batches(steps=7):
            session.step(batch)
            if batch.step == 4:
                with session.averaged():
                    session.evaluate(data)
        assert fingerprint(averaged(session)) != fingerprint(session.model_state())
        with session.averaged():
            value = session.evaluate(data)
        found[f"{name} {average['kind']}"] = [fingerprint(averaged(session)), session.fingerprint(), value]

folder = f"{FOLDER}/kept-{session.workers}"
model, session = start(exact=True, average=SWA, strategy="pipeline", checkpoint=folder)
for batch in session.batches(steps=4):
    session.step(batch)
session.save()
model, session = start(exact=True, average=SWA, checkpoint=folder, resume="auto")
for batch in session.batches(steps=7):
    session.step(batch)
found["resumed swa"] = [fingerprint(averaged(session)), session.fingerprint(), session.evaluate(data) * 0]
try:
    start(exact=True, checkpoint=folder, resume="auto")
except paceline.CheckpointError as error:
    tell(said=str(error).replace(folder, ""))
tell(found=found)
"""


@pytest.mark.slow
def test_the_same_bits_on_any_number_of_workers(printed: Printed, tmp_path: Path) -> None:
    script = HEAD + STRATEGIES.replace("FOLDER", repr(str(tmp_path)))
    (alone,) = printed(script.replace("ELSE", "False"), 1, tmp_path)
    everyone = printed(script.replace("ELSE", "True"), 3, tmp_path)
    for one in everyone:
        assert one == everyone[0]
        for name in ("resumed swa", *alone["found"]):
            other = "allreduce " + name.split()[1]
            assert one["found"][name][:2] == alone["found"][other][:2], name
            assert one["found"][name][2] == alone["found"][name][2], name
    assert "was made with another update: the optimizer was 'AdamW, average: swa' and is now 'AdamW'" in one["said"]
