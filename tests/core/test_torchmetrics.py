"""The metrics of torchmetrics, alone and in a collection: on any number of workers what one process computes."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("torchmetrics") is None, reason="torchmetrics is not installed")
Printed = Callable[..., list[dict[str, Any]]]

SCRIPT = """
from functools import partial
import torch
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix
import paceline
from subjects import classes, mlp, tell

data, test = classes(60), classes(301)
given = dict(num_classes=4, validate_args=False)
metrics = {
    "accuracy": MulticlassAccuracy(**given),
    "area": MulticlassAUROC(**given),
    "both": MetricCollection({"confusion": MulticlassConfusionMatrix(**given), "area": MulticlassAUROC(**given)}),
}

session = paceline.start(
    model=mlp(), optimizer=partial(torch.optim.SGD, lr=0.1), loss=torch.nn.functional.cross_entropy,
    data=data, batch=16,
)
for batch in session.batches(steps=3):
    session.step(batch)

def plain(value):
    return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else torch.as_tensor(value).tolist()

evaluated = plain(session.evaluate(test, metrics))
logits, target = session.predict(test), torch.tensor([int(one[1]) for one in test])
expected = {}
for name, metric in metrics.items():
    own = metric.clone()
    for one in own.values() if isinstance(own, MetricCollection) else [own]:
        one.distributed_available_fn = lambda: False
    own.reset()
    own.update(logits, target)
    expected[name] = plain(dict(own.compute()) if isinstance(own, MetricCollection) else own.compute())
left = [one.distributed_available_fn() for one in (metrics["accuracy"], *metrics["both"].values())]
tell(evaluated=evaluated, expected=expected, left=left)
"""


@pytest.mark.slow
def test_they_compute_what_one_process_computes(printed: Printed, tmp_path: Path) -> None:
    (alone,) = printed(SCRIPT, 1, tmp_path)
    several = printed(SCRIPT, 2, tmp_path)
    for one in (alone, *several):
        assert one["evaluated"]["accuracy"] == pytest.approx(alone["expected"]["accuracy"], abs=1e-6)
        assert one["evaluated"]["area"] == pytest.approx(alone["expected"]["area"], abs=1e-6)
        assert one["evaluated"]["both"]["area"] == pytest.approx(alone["expected"]["area"], abs=1e-6)
        assert one["evaluated"]["both"]["confusion"] == alone["expected"]["both"]["confusion"]
        assert one["left"] == [len(several) > 1 and one is not alone] * 3  # outside they see the others again
    assert sum(map(sum, alone["expected"]["both"]["confusion"])) == 301
