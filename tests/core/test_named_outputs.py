"""Models that return dataclasses: metrics, evaluations and predictions with all schedules and servers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

SCRIPT = """
import dataclasses, json, os
from functools import partial
import torch
from torch import nn
from torch.nn import functional
import paceline
from subjects import Folded, classes, tell

@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor
    loss: torch.Tensor | None = None

torch.export.register_dataclass(Output)

class Head(nn.Linear):
    def forward(self, values):
        return Output(super().forward(values), values)

def model():
    torch.manual_seed(3)
    wide = [layer for _ in range(2) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), *wide, Head(16, 4))

def loss(output, target):
    hit, second = output.logits.argmax(1) == target, target == 1
    value = functional.cross_entropy(output.logits, target)
    found = {"accuracy": hit.float().mean(), "recall": (hit[second].sum(), second.sum()), "again": value.detach()}
    return dataclasses.replace(output, loss=value), found

def accuracy(output, target):
    return (output.logits.argmax(1) == target).float().mean()

def pair(model, batch):
    return model(batch[0]).logits, batch[1]

def measured(session, length):
    some = classes(length)
    values = session.evaluate(some, {"accuracy": accuracy, "loss": None})
    values["folded"] = session.evaluate(some, Folded(), forward=pair)
    predicted, own = session.predict(some), session.predict(some, everywhere=False)
    assert (own is None) == (session.rank > 0)
    assert own is None or all(torch.equal(own[name], predicted[name]) for name in own)
    return [str(values), {name: one.tolist() for name, one in predicted.items()}]

def train(**given):
    session = paceline.start(
        model=model(), optimizer=partial(torch.optim.SGD, lr=0.1), loss=loss, data=classes(90), batch=40,
        microbatches=8, **given,
    )
    found = []
    for batch in session.batches(steps=5):
        report = session.step(batch)
        found.append([report.loss.hex(), {name: value.hex() for name, value in report.metrics.items()}])
        if batch.step == 2:
            found.append([measured(session, length) for length in (100, 2, 1)])
    return [found, session.fingerprint()]

tell(**{str(place): train(**given) for place, given in enumerate(json.loads(os.environ['GIVEN']))})
"""
HYBRIDS = [{"stages": 2, "replicas": given} for given in ([2, 1], [1, 2])]
PIPELINES = [{"schedule": name} for name in ("layerwise", "gpipe", "1f1b", "zb-h1", "zb-v", "interleaved")]
SERVERS = [{"count": 2}, {"dedicated": True}, {"count": 2, "dedicated": True}]
EXACT = [
    *({"strategy": "pipeline", "pipeline": one} for one in (*PIPELINES, *HYBRIDS, {"recompute": True})),
    *({"strategy": "parameter-server", "server": {"mode": "sync", **one}} for one in SERVERS),
    {"strategy": "stealing"},
]
LOOSE = [
    *({"strategy": "pipeline", "pipeline": {"schedule": "pipedream", **one}} for one in ({}, *HYBRIDS)),
    {"strategy": "pipeline", "pipeline": {"schedule": "2bw"}},
    {"strategy": "parameter-server", "server": {"mode": "async"}},
    {"strategy": "parameter-server", "server": {"mode": "bounded", "count": 2, "dedicated": True}},
    {"strategy": "hogwild"},
    {"strategy": "local-sgd", "local": {"every": 3}},
]


@pytest.mark.slow
def test_named_outputs_with_each_strategy(printed: Printed, tmp_path: Path) -> None:
    (alone,) = printed(SCRIPT, 1, tmp_path, environment={"GIVEN": json.dumps([{"exact": True}])})
    given = [one | {"exact": True} for one in EXACT] + LOOSE
    everyone = printed(SCRIPT, 3, tmp_path, environment={"GIVEN": json.dumps(given)})
    for place, one in enumerate(given):
        told = [worker[str(place)] for worker in everyone]
        if "exact" in one:
            assert all(found == alone["0"] for found in told), one
        assert len({json.dumps([found[3], fingerprint]) for found, fingerprint in told}) == 1, one
        for found, _ in told:
            check_metrics([step for number, step in enumerate(found) if number != 3], one)


def check_metrics(steps: list[Any], given: dict[str, Any]) -> None:
    """They are those of the samples that the loss is of."""
    known = 0
    for loss, metrics in steps:
        if metrics:
            known += 1
            assert list(metrics) == ["accuracy", "again", "recall"], given
            assert abs(float.fromhex(metrics["again"]) - float.fromhex(loss)) < 1e-6, given
    assert known >= 3, given
