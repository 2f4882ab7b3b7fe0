"""Metrics beside the loss, evaluations and predictions where workers are lost and join within an epoch."""

from typing import Any

import pytest
from launching import Ran, Run
from test_recovery import ELASTIC

from paceline.testing import faults

STEPS = 12
# samples are dataclasses, and so is what the model returns; the last batch of an epoch is one microbatch
HEAD = """
import dataclasses, json, os

import scripted
import torch
from subjects import Folded, convnet, images
from torch.nn import functional

@dataclasses.dataclass
class Sample:
    values: torch.Tensor
    target: torch.Tensor

@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = convnet()
    def forward(self, values):
        return Output(self.layers(values))

def metrics_of(output, target):
    hit, second = output.logits.argmax(1) == target, target == 2
    return {"accuracy": hit.float().mean(), "recall": (hit[second].sum(), second.sum())}

def loss(output, target):
    return functional.cross_entropy(output.logits, target), metrics_of(output, target)

def forward(model, batch):
    output = model(batch.values)
    output.loss = functional.cross_entropy(output.logits, batch.target)
    return output, metrics_of(output, batch.target)

def pair(model, batch):
    values, target = (batch.values, batch.target) if isinstance(batch, Sample) else batch
    return model(values).logits, target

def samples(length):
    return [Sample(*one) for one in images(length)] if FORWARD else images(length)

def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()

def outputs(model, batch):
    return dict(zip(("logits", "target"), pair(model, batch)))

def measured(session):
    found = session.evaluate(samples(43), {"accuracy": accuracy, "folded": Folded()}, forward=pair)
    alone = session.evaluate(samples(1), {"accuracy": accuracy, "folded": Folded()}, forward=pair)
    predicted = session.predict(samples(43), outputs)
    own = session.predict(samples(2), outputs, everywhere=False)
    assert (own is None) == (session.rank > 0)
    return [found, alone, session.evaluate(samples(43)).hex(), {key: one.tolist() for key, one in predicted.items()}]
"""
SCRIPT = (
    HEAD
    + f"""
given = {{"forward": forward, "loss": None, "data": samples(100)}} if FORWARD else {{"loss": loss}}
session = scripted.begin(model=Net(), microbatches=8, **given, **GIVEN)
told, values = {{}}, {{}}
for batch in session.batches(steps={STEPS}):
    if batch.step == 6:
        scripted.await_joiner(session)
    report = session.step(batch)
    told[batch.step] = [report.loss.hex(), {{name: value.hex() for name, value in report.metrics.items()}}]
    scripted.say(session, report)
    if batch.step in (4, 9):
        values[batch.step] = measured(session)
scripted.end(session, told=told, values=values)
"""
)
WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "allreduce": (True, {}),
    "stealing": (True, {"strategy": "stealing"}),
    "servers": (False, {"strategy": "parameter-server", "server": {"mode": "sync", "count": 2}}),
    "pipeline": (False, {"strategy": "pipeline", "pipeline": {"stages": 2}}),
}


def of(way: str) -> str:
    forward, given = WAYS[way]
    return f"FORWARD, GIVEN = {forward}, {given}\n" + SCRIPT


def check(ran: Ran, wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """All that the workers tell is what one process tells; gives what each told."""
    assert ran.code == 0, ran.report()
    ran.check_steps(STEPS)
    everyone = ran.printed()
    for one in everyone:
        assert one["fingerprint"] == wanted["fingerprint"], ran.report()
        assert str(STEPS - 1) in one["told"]
        for name in ("told", "values"):
            assert one[name] == {step: wanted[name][step] for step in one[name]}, ran.report()
    return everyone


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
def test_one_is_lost_and_another_one_joins(run: Run, undisturbed: Any, way: str) -> None:
    ran = run(of(way), *ELASTIC, faults=faults.kill(rank=1, step=3))
    everyone = check(ran, undisturbed(of(way)))
    assert len(everyone) == 3, ran.report()
    assert min(len(one["told"]) for one in everyone) < STEPS == max(len(one["told"]) for one in everyone)


KILLED = """
import os
import scripted
from paceline.evaluation.predictions import Predictions

combine, calls = Predictions.combine, []
def combine_once(*given):
    calls.append(given)
    if len(calls) == 2:
        os.kill(os.getpid(), 9)
    return combine(*given)
if os.environ["PACELINE_WORKER"] == "0":
    Predictions.combine = combine_once
scripted.hold_back(3, "end")
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["allreduce", "pipeline"])
def test_one_is_lost_in_a_prediction(run: Run, undisturbed: Any, way: str) -> None:
    """Rank 0, in the one that it alone gets; nobody joins."""
    script = of(way).replace("batch.step == 6", "False")
    ran = run(KILLED + script, *ELASTIC)
    assert len(check(ran, undisturbed(script))) == 2, ran.report()


GATHERED = (
    HEAD
    + """
session = scripted.begin(model=Net(), microbatches=8, loss=loss, **GIVEN)
found = []
for batch in session.batches(steps=6):
    scripted.say(session, session.step(batch))
    if "ALONE" not in os.environ:
        scripted.leave(session, batch, 0, 3)
    predicted = session.predict(samples(43), outputs, everywhere=False)
    assert (predicted is None) == (session.rank > 0)
    found.append(predicted and predicted["logits"].tolist())
scripted.end(session, found=found)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"strategy": "pipeline"}])
def test_the_next_rank_0_has_the_predictions(run: Run, undisturbed: Any, given: dict[str, Any]) -> None:
    """Rank 0 is told to leave, and goes in the prediction."""
    script = f"FORWARD, GIVEN = False, {given}\n" + GATHERED
    ran = run(script, "-n", 2, "--elastic", "1:2")
    wanted = undisturbed(script)
    assert ran.code == 0, ran.report()
    (one,) = ran.printed()
    assert one["fingerprint"] == wanted["fingerprint"]
    assert one["found"] == [None] * 3 + wanted["found"][3:], ran.report()
